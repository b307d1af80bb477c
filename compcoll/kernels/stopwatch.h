#pragma once

#include <chrono>

namespace compcoll {

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
