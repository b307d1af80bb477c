#pragma once

#include <chrono>

namespace compcoll {

// Seconds of the clock that Python's time.perf_counter reads.
inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Adds the seconds of its lifetime to a variable.
class Stopwatch {
public:
    explicit Stopwatch(double& seconds) : seconds_(seconds), begun_(Clock::now()) {}
    ~Stopwatch() { seconds_ += std::chrono::duration<double>(Clock::now() - begun_).count(); }
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;

private:
    using Clock = std::chrono::steady_clock;

    double& seconds_;
    Clock::time_point begun_;
};

}  // namespace compcoll
