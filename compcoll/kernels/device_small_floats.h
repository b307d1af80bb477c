// Floats of 8 bits by the GPU's conversions, whose results equal those of SmallFloat.
#pragma once

#include "device.h"
#include "small_floats.h"

namespace compcoll {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <class Format>
__device__ __forceinline__ uint32_t narrowed_pair(float low, float high) {
    uint16_t pair;
    if constexpr (Format::exponent_bits == 4) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
template <class Format>
__device__ __forceinline__ uint32_t widened_pair(uint16_t pair) {
    uint32_t halves;
    if constexpr (Format::exponent_bits == 4) asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    else asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}

template <class Format>
__device__ __forceinline__ uint32_t narrowed_four(const float (&x)[4], float factor) {
    return narrowed_pair<Format>(exact_product(x[0], factor), exact_product(x[1], factor)) |
           narrowed_pair<Format>(exact_product(x[2], factor), exact_product(x[3], factor)) << 16;
}
template <class Format>
__device__ __forceinline__ void widened_four(uint32_t word, float factor, float (&x)[4]) {
    COMPCOLL_UNROLL for (int pair = 0; pair < 2; ++pair) {
        const uint32_t halves = widened_pair<Format>(static_cast<uint16_t>(word >> 16 * pair));
        COMPCOLL_UNROLL for (int k = 0; k < 2; ++k) {
            float value;
            asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(halves >> 16 * k)));
            x[2 * pair + k] = exact_product(value, factor);
        }
    }
}
#endif

}  // namespace compcoll
