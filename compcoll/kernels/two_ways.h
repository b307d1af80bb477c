// Which of two ways to run a call takes less time, where others want the cores: measured as the calls go by, since no model knows
// when the system lets a rank run.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>

namespace compcoll {

enum class Way : size_t { usual, other };

// Of the calls of one recipe. Each way is tried at first; then the one runs whose calls took less in the mean, in which the few that
// wait for a core count as they should; and the other for a small part of the time, so that it is known, too. Of a way that ran but
// a few times the shortest call counts: of so few, one that waited long says little, and would be believed for long.
class TwoWays {
public:
    Way next() const {
        for (const Way way : {Way::usual, Way::other})
            if (!of(way).known) return way;
        const bool usual_is_faster = mean(Way::usual) <= mean(Way::other);
        const Way faster = usual_is_faster ? Way::usual : Way::other, slower = usual_is_faster ? Way::other : Way::usual;
        return of(slower).seconds < part_tried * of(faster).seconds ? slower : faster;
    }

    // The way of the last call.
    Way last() const { return last_; }

    // What a call took that way.
    void took(Way way, double seconds) {
        last_ = way;
        Seen& seen = of(way);
        if (seen.ran++ == 0) return;  // the first call also makes what the others find made
        seen.least = std::min(seen.least, seconds);
        seen.calls += 1.0;
        seen.seconds += seconds;
        seen.known = seen.known || seen.calls >= many || (seen.calls >= few && seen.seconds >= tried);
        if (seen.seconds < remembered || seen.calls < 2 * many) return;
        for (Seen& each : seen_) each.calls /= 2, each.seconds /= 2;
    }

private:
    static constexpr double few = 2.0, many = 100.0, tried = 0.01;  // calls and seconds by which a way is known
    static constexpr double part_tried = 0.03;
    static constexpr size_t several = 9;
    static constexpr double remembered = 2.0;  // seconds of calls, or so many calls: what was long ago counts less

    struct Seen {
        size_t ran = 0;
        double calls = 0.0, seconds = 0.0, least = std::numeric_limits<double>::infinity();
        bool known = false;
    };

    Seen& of(Way way) { return seen_[static_cast<size_t>(way)]; }
    const Seen& of(Way way) const { return seen_[static_cast<size_t>(way)]; }
    double mean(Way way) const { return of(way).ran < several ? of(way).least : of(way).seconds / of(way).calls; }

    std::array<Seen, 2> seen_{};
    Way last_ = Way::usual;
};

}  // namespace compcoll
