// Access to values at addresses of any alignment. All functions are inlined, because files compiled for different instruction sets
// must not share code.
#pragma once

#include "portable.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "wires are little endian");

namespace compcoll {

template <class T>
COMPCOLL_HD T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

template <class T>
COMPCOLL_HD void store(void* to, T value) {
    std::memcpy(to, &value, sizeof(T));
}

// *value = decoded, or with `add`: *value = *base + decoded
template <bool add, class T>
COMPCOLL_HD void put(T* value, const T* base, T decoded) {
    store(value, add ? load<T>(base) + decoded : decoded);
}

// Prefetch memory while the processor computes on other values. The addresses need not be valid: prefetching cannot fault.
template <class T>
COMPCOLL_HD void prefetch(const T* values, size_t ahead, size_t n) {
    const auto begin = reinterpret_cast<uintptr_t>(values) + ahead * sizeof(T);
    for (size_t i = 0; i < n * sizeof(T); i += 64) __builtin_prefetch(reinterpret_cast<const void*>(begin + i));
}

// For loops that read base[i] and write values[i]: these are equal or do not overlap.
#if defined(__clang__)
#define SAME_OR_APART _Pragma("clang loop vectorize(assume_safety)")
#else
#define SAME_OR_APART _Pragma("GCC ivdep")
#endif

// The number of values before the next cache line, at most n. Vector loads in a long loop that starts there do not straddle two
// lines.
template <class T>
COMPCOLL_HD size_t before_line(const T* values, size_t n) {
    const size_t count = (0 - reinterpret_cast<uintptr_t>(values)) % 64 / sizeof(T);
    return count < n ? count : n;
}

// Copy bytes to memory larger than the caches: it is written without being read first. Then call `publish`. `to` is aligned to 16
// bytes; return how many bytes were copied, a multiple of 16.
COMPCOLL_HD size_t copy_past_caches([[maybe_unused]] uint8_t* to, [[maybe_unused]] const uint8_t* from, [[maybe_unused]] size_t nbytes) {
    size_t at = 0;
#if defined(__SSE2__)
    for (; at + sizeof(__m128i) <= nbytes; at += sizeof(__m128i))
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
#endif
    return at;
}

// Make the stores of copy_past_caches visible to other threads.
COMPCOLL_HD void publish() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

}  // namespace compcoll
