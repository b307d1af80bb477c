// How long a wait spins, yields and sleeps before it returns to its caller, which then does something else. No wait keeps a core
// that others may need busy for longer than some tens of microseconds. Spins and sleeps take longer while other work has the core,
// so the clock limits them, too. After sleeps in vain a wait sleeps no more: its caller polls on until its timeout.
#pragma once

#include <nanobind/nanobind.h>

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <thread>
#include <utility>

#include "futex.h"

namespace compcoll {

// A wait polls `spins` times, about a microsecond each. Then it polls with a yield of the core between polls. Then it sleeps
// for up to `sleeps` milliseconds and polls after each sleep.
struct WaitPolicy {
    using Clock = std::chrono::steady_clock;
    static constexpr std::chrono::microseconds first_sleep{100}, longest_yielding_sleep{1000}, longest_sleep{4000};
    static constexpr size_t few = 2;  // spins where ranks share their cores
    static constexpr std::chrono::microseconds message{2500};
    static constexpr std::chrono::milliseconds longest_with_gil{30};

    // In ms. The caller may need the GIL afterwards, and another thread may hold it for long.
    static constexpr size_t most_sleeps = 250;

    size_t spins = 1, sleeps = 0;
    bool in_vain = false;  // whether all sleeps have passed without the event

    bool may_sleep() const { return sleeps > 0 && !in_vain; }

    // Prepare the next wait, once the event of this wait has happened.
    void renew() { in_vain = false; }

    // The limit of `sleeps` for a wait of at most `timeout` seconds.
    static size_t sleeps_within(double timeout) { return static_cast<size_t>(std::min<double>(most_sleeps, 1000 * timeout / 4)); }

    // Poll memory that another process will write, in quick succession while it may be written soon. Call without the GIL.
    template <class Test>
    bool poll_memory(Test test) const {
        const auto begun = Clock::now();
        do {
            for (int i = 0; i < 4; ++i, relax())
                if (test()) return true;
        } while (spins > few && Clock::now() - begun < std::chrono::microseconds(spins));
        return may_sleep() && yield(test);
    }

    // Sleep between polls by `sleep(most)`, which ends early if something arrives, so that other work has the core. Call without the
    // GIL.
    template <class Test, class Sleep>
    bool sleep(Test test, Sleep sleep) {
        const auto end = Clock::now() + sleep_budget();
        for (auto time = first_sleep; Clock::now() < end; time = std::min(2 * time, longest_sleep)) {
            sleep(time);
            if (test()) return true;
        }
        in_vain = true;
        return false;
    }

    // Poll for an event that only an MPI call reports and that wakes nobody. A sleep takes a fiftieth of the time waited so far,
    // plus some 50 us until the system runs the thread again. So there are no sleeps while a message of 256 KiB is under way at 1
    // Gb/s. Call without the GIL.
    template <class Test>
    bool poll_mpi(Test test) {
        const auto begun = Clock::now(), spun = begun + std::chrono::microseconds(spins);
        do {
            if (test()) return true;
        } while (spins > 1 && Clock::now() < spun);
        return may_sleep() && (yield(test, message) ||
                            sleep_between_polls(test, begun, begun + sleep_budget(), [](auto time) { std::this_thread::sleep_for(time); }));
    }

    // Poll for an event that only a Python function reports. Call with the GIL, which only sleeps release.
    template <class Test>
    bool poll_python(Test test) {
        if (spins > 0 && test()) return true;
        const auto begun = Clock::now(), end = begun + longest_with_gil;
        for (size_t i = 1; i < spins && Clock::now() < end; ++i)
            if (test()) return true;
        if (!may_sleep()) return false;
        if (yield(test)) return true;  // keeps the GIL: taking it back from a computing thread costs a switch interval
        return sleep_between_polls(test, begun, begun + std::min(longest_with_gil, sleep_budget()), [](auto time) {
            const nanobind::gil_scoped_release released;
            std::this_thread::sleep_for(time);
        });
    }

    // Poll an operation that advances only while it is polled. Call with the GIL; polls only briefly for that reason.
    template <class Test>
    bool poll_without_sleeps(Test test) const {
        return spins > 0 && (test() || (may_sleep() && yield(test, longest_with_gil)));
    }

private:
    std::chrono::milliseconds sleep_budget() const { return std::chrono::milliseconds(may_sleep() ? sleeps : 0); }

    template <class Test, class Sleep>
    bool sleep_between_polls(Test test, Clock::time_point begun, Clock::time_point end, Sleep sleep) {
        while (Clock::now() < end) {
            sleep(std::clamp<Clock::duration>((Clock::now() - begun) / 50, first_sleep / 2, longest_yielding_sleep));
            if (test()) return true;
        }
        in_vain = true;
        return false;
    }

    // Ranks that share a core hand it to each other by a yield at little cost. An unrelated process that computes keeps it for a
    // time slice. Sleeping is better then, because Linux runs a woken thread first. It replaces yields for so long that the lost
    // slices are negligible.
    template <class Test>
    static bool yield(Test test, std::chrono::microseconds soon = std::chrono::microseconds(200)) {
        constexpr std::chrono::microseconds slice{500};
        constexpr int negligible_after = 30;
        static std::atomic<bool> costly{false};  // whether the previous yield cost a slice
        static std::atomic<Clock::rep> costly_until{Clock::time_point::min().time_since_epoch().count()};
        auto now = Clock::now();
        const auto end = now + soon;
        while (now < end && now.time_since_epoch().count() >= costly_until.load(std::memory_order_relaxed)) {
            sched_yield();
            const auto before = std::exchange(now, Clock::now());
            if (costly.exchange(now - before > slice) && now - before > slice)  // twice in a row
                costly_until.store((now + negligible_after * (now - before)).time_since_epoch().count(), std::memory_order_relaxed);
            if (test()) return true;
        }
        return false;
    }
};

}  // namespace compcoll
