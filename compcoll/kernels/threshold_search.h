// The search for a threshold that a wanted number of magnitudes exceeds.
#pragma once

#include <cmath>
#include <cstddef>
#include <optional>

namespace compcoll {

// The threshold is between head and tail. Earlier trials give a threshold and its count.
struct ThresholdSearch {
    double low, high;   // accepted counts
    double head, tail;
    double first, second;  // next trials; the second counts only if it is between head and tail
    double known, known_count;  // the trial before the first; a count of 0 means none

    // Search after these trials, usually by bisection. If the counts of the last two trials, extrapolated exponentially, predict a
    // threshold in the range for the middle of the accepted counts, try that. Every third trial bisects, as a safeguard that no
    // known input needs: steps stay short only while counts converge geometrically, which integers cannot for long. Return nothing
    // once the range is narrow.
    template <class Count>
    std::optional<double> run(Count count) {
        constexpr double narrow = 1e-6;  // relative to the tail
        const double least = narrow * tail, middle = std::sqrt(low * high);
        for (size_t trials = 1; tail - head > least; ++trials) {
            const auto above = static_cast<double>(count(first));
            if (low <= above && above <= high) return first;
            (above > high ? head : tail) = first;
            const double counted = above > 0 ? above : 0.5;
            if (!between(second) && known_count > 0 && known_count != counted && trials % 3 != 0)
                second = first + (first - known) * std::log(counted / middle) / std::log(known_count / counted);
            known = first;
            known_count = counted;
            first = between(second) ? second : (head + tail) / 2;
            second = 0;
        }
        return std::nullopt;
    }

private:
    bool between(double threshold) const { return head < threshold && threshold < tail; }
};

}  // namespace compcoll
