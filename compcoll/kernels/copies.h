// Copies into memory that another core reads next. A core can write a line that another core has read only once that core gives it
// up. This is fast where both cores share a cache. Where they do not (two sockets; virtual machines may move between them), it runs
// at 2.4 GB/s. Non-temporal stores to main memory do not request the lines (25 GB/s), but a reader with a common cache gets them
// later.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "unaligned.h"

namespace compcoll {

template <class Clock = std::chrono::steady_clock>
class CopiesForAnotherCore {
public:
    // All bytes are visible before later stores. `to` must be aligned to a cache line.
    void copy(uint8_t* to, const uint8_t* from, size_t nbytes) const {
        if (far_ > limit && nbytes >= worth_it) {
            const size_t copied = copy_past_caches(to, from, nbytes);
            to += copied, from += copied, nbytes -= copied;
            publish();
        }
        std::memcpy(to, from, nbytes);
    }

    // Store a number that the other core polls, and infer from the duration whether that core is near.
    void store(std::atomic<uint64_t>& number, uint64_t value) {
        std::atomic_thread_fence(std::memory_order_seq_cst);  // excludes the copies from the measured time
        const auto begun = Clock::now();
        number.store(value);
        const bool late = Clock::now() - begun > near;
        far_ = late ? std::min(far_ + 3, 4 * limit) : std::max(far_ - 1, 0);  // counts down slowly, as the line may have come back by itself
    }

private:
    static constexpr size_t worth_it = 8 * 1024;  // shorter copies are read faster from a cache than from main memory
    static constexpr std::chrono::nanoseconds near{90};  // measured: 130 to 170 ns across sockets, far less with a common cache
    static constexpr int limit = 8;  // above what an occasional interrupted store adds

    int far_ = 0;
};

}  // namespace compcoll
