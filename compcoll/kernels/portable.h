// Basics of every kernel header, for all compilers: g++, clang++, nvcc and NVRTC.
#pragma once

#if defined(__CUDACC__)
#define COMPCOLL_HD __host__ __device__ __forceinline__
#else
#define COMPCOLL_HD inline __attribute__((always_inline))
#endif

#if defined(__CUDACC_RTC__)
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstddef>
#include <cstdint>
#include <cstring>
#endif

namespace compcoll {

// The bits of a value as another type of the same size (std::bit_cast, which NVRTC lacks).
template <class To, class From>
COMPCOLL_HD To bits_as(const From& value) {
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    To result;
#if defined(__CUDACC__)
    result = *reinterpret_cast<const To*>(&value);
#else
    std::memcpy(&result, &value, sizeof(To));
#endif
    return result;
}

// The number of zeros below the lowest one bit, or above the highest one bit; `bits` is not 0.
#if defined(__CUDA_ARCH__)
COMPCOLL_HD int trailing_zeros(uint64_t bits) { return __ffsll(static_cast<long long>(bits)) - 1; }
COMPCOLL_HD int trailing_zeros(uint32_t bits) { return __clz(static_cast<int>(__brev(bits))); }
COMPCOLL_HD int leading_zeros(uint64_t bits) { return __clzll(static_cast<long long>(bits)); }
COMPCOLL_HD int leading_zeros(uint32_t bits) { return __clz(static_cast<int>(bits)); }
#else
COMPCOLL_HD int trailing_zeros(uint64_t bits) { return __builtin_ctzll(bits); }
COMPCOLL_HD int trailing_zeros(uint32_t bits) { return __builtin_ctz(bits); }
COMPCOLL_HD int leading_zeros(uint64_t bits) { return __builtin_clzll(bits); }
COMPCOLL_HD int leading_zeros(uint32_t bits) { return __builtin_clz(bits); }
#endif

}  // namespace compcoll
