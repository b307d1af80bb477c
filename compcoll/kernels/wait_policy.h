// How long something is waited for before the caller does something else, and how: nothing keeps a core busy for longer than some tens
// of microseconds that another may need. Looks and naps take as long as other work has the core: so the clock ends them, too. Naps in
// vain are the last of a wait: the caller goes on looking, and at its time-out.
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

// So many looks, about a microsecond each; then some after each of which others may have the core; and then so many milliseconds of
// naps, after each of which there is another.
struct WaitPolicy {
    using Clock = std::chrono::steady_clock;
    static constexpr std::chrono::microseconds shortest_nap{100}, longest_nap{1000}, longest_sleep{4000};
    static constexpr size_t few = 2;  // looks where ranks share their cores
    static constexpr std::chrono::microseconds message{2500};
    static constexpr std::chrono::milliseconds longest_with_gil{30};

    static constexpr size_t most_naps = 250;  // what comes after them may need the GIL, which another thread may have for long

    size_t spins = 1, sleeps = 0;
    bool in_vain = false;  // were the naps

    bool may_sleep() const { return sleeps > 0 && !in_vain; }

    // For the next wait, once what this one was for has come.
    void renew() { in_vain = false; }

    // By the seconds that a wait may last.
    static size_t sleeps_within(double timeout) { return static_cast<size_t>(std::min<double>(most_naps, 1000 * timeout / 4)); }

    // Of memory that another process will write: again and again, while it may come soon. Without the GIL.
    template <class Test>
    bool look(Test test) const {
        const auto begun = Clock::now();
        do {
            for (int i = 0; i < 4; ++i, relax())
                if (test()) return true;
        } while (spins > few && Clock::now() - begun < std::chrono::microseconds(spins));
        return may_sleep() && yield(test);
    }

    // Sleeps in between, so that others have the core, by `sleep(most)`, which ends early when something comes. Without the GIL.
    template <class Test, class Sleep>
    bool sleep(Test test, Sleep sleep) {
        const auto end = Clock::now() + napping();
        for (auto nap = shortest_nap; Clock::now() < end; nap = std::min(2 * nap, longest_sleep)) {
            sleep(nap);
            if (test()) return true;
        }
        in_vain = true;
        return false;
    }

    // Of what only MPI's look can tell, which nothing would wake this up for: a nap takes a fiftieth of the time waited for so far, and
    // some 50 us more until the system wakes who slept, so that there are none while a message of 256 KiB is on its way at 1 Gb/s.
    // Without the GIL.
    template <class Test>
    bool watch(Test test) {
        const auto begun = Clock::now(), spun = begun + std::chrono::microseconds(spins);
        do {
            if (test()) return true;
        } while (spins > 1 && Clock::now() < spun);
        return may_sleep() && (yield(test, message) ||
                            nap(test, begun, begun + napping(), [](auto time) { std::this_thread::sleep_for(time); }));
    }

    // Of what only a function of Python's can tell. With the GIL, but for the naps.
    template <class Test>
    bool ask(Test test) {
        if (spins > 0 && test()) return true;
        const auto begun = Clock::now(), end = begun + longest_with_gil;
        for (size_t i = 1; i < spins && Clock::now() < end; ++i)
            if (test()) return true;
        if (!may_sleep()) return false;
        if (yield(test)) return true;  // with the GIL: to let it go takes a switch interval beside a thread that computes
        return nap(test, begun, begun + std::min(longest_with_gil, napping()), [](auto time) {
            const nanobind::gil_scoped_release released;
            std::this_thread::sleep_for(time);
        });
    }

    // Of what gets on only while it is looked at. With the GIL, and so not for long.
    template <class Test>
    bool ask_without_naps(Test test) const {
        return spins > 0 && (test() || (may_sleep() && yield(test, longest_with_gil)));
    }

private:
    std::chrono::milliseconds napping() const { return std::chrono::milliseconds(may_sleep() ? sleeps : 0); }

    template <class Test, class Sleep>
    bool nap(Test test, Clock::time_point begun, Clock::time_point end, Sleep sleep) {
        while (Clock::now() < end) {
            sleep(std::clamp<Clock::duration>((Clock::now() - begun) / 50, shortest_nap / 2, longest_nap));
            if (test()) return true;
        }
        in_vain = true;
        return false;
    }

    // Ranks that share a core hand it to each other so at little cost. A stranger that computes keeps it for a slice: it is then better
    // to sleep, as Linux runs what wakes up first, and that is done for so long that the time lost is of no account.
    template <class Test>
    static bool yield(Test test, std::chrono::microseconds soon = std::chrono::microseconds(200)) {
        constexpr std::chrono::microseconds slice{500};
        constexpr int of_no_account = 30;
        static std::atomic<bool> dear{false};  // the yield before
        static std::atomic<Clock::rep> dear_until{Clock::time_point::min().time_since_epoch().count()};
        auto now = Clock::now();
        const auto end = now + soon;
        while (now < end && now.time_since_epoch().count() >= dear_until.load(std::memory_order_relaxed)) {
            sched_yield();
            const auto before = std::exchange(now, Clock::now());
            if (dear.exchange(now - before > slice) && now - before > slice)  // not just once
                dear_until.store((now + of_no_account * (now - before)).time_since_epoch().count(), std::memory_order_relaxed);
            if (test()) return true;
        }
        return false;
    }
};

}  // namespace compcoll
