// Copies into memory that another core reads next. A line that it has read is written once it has given it up: at once where the two
// cores have a cache in common; where they have not (two sockets; virtual machines move from one to the other) at 2.4 GB/s. Written
// past this core's caches, into main memory, lines need not be asked for (25 GB/s), but cores with a common cache read them later.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace compcoll {

template <class Clock = std::chrono::steady_clock>
class CopiesForAnotherCore {
public:
    // All of it is seen before what is stored later. `to` is the beginning of a cache line.
    void copy(uint8_t* to, const uint8_t* from, size_t nbytes) const {
#if defined(__SSE2__)
        if (far_ > limit && nbytes >= worth_it) {
            const size_t whole = nbytes / line * line;
            for (size_t at = 0; at < whole; at += sizeof(__m128i))
                _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
            to += whole, from += whole, nbytes -= whole;
            _mm_sfence();
        }
#endif
        std::memcpy(to, from, nbytes);
    }

    // Stores a number that the other core looks at, and learns from how long that takes where it is.
    void store(std::atomic<uint64_t>& number, uint64_t value) {
        std::atomic_thread_fence(std::memory_order_seq_cst);  // what was copied is not counted
        const auto begun = Clock::now();
        number.store(value);
        const bool late = Clock::now() - begun > near;
        far_ = late ? std::min(far_ + 3, 4 * limit) : std::max(far_ - 1, 0);  // the line has come back by itself at times
    }

private:
    static constexpr size_t line = 64;
    static constexpr size_t worth_it = 8 * 1024;  // fewer are read sooner out of a cache than out of main memory
    static constexpr std::chrono::nanoseconds near{90};  // seen: 130 to 170 apart; by far less with a common cache
    static constexpr int limit = 8;  // more than an interrupted store now and then

    int far_ = 0;
};

}  // namespace compcoll
