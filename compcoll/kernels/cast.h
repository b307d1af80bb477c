// The cast codec's arithmetic: one value to a shorter floating-point format, and back.
//
// Rounding is to nearest, ties to even, once. Values that are too large become Inf, and NaN stays NaN (quiet, with the upper
// bits of its payload). Subnormal numbers are kept, even on a GPU that flushes them: float16 uses the bits, or one addition or
// subtraction of normal numbers; bfloat16 uses the bits only.
#pragma once

#include "portable.h"

namespace compcoll {

// condition ? a : b, where floating-point arithmetic gives a: a branch around it would prevent vectorization.
COMPCOLL_HD uint32_t chosen(bool condition, uint32_t a, uint32_t b) {
    return b ^ ((a ^ b) & (0u - static_cast<uint32_t>(condition)));
}

// For each format: round a float to its bits, and convert its bits to a float. Magnitudes (bits without the sign) are int32_t,
// which every vector unit can compare.
struct Float16 {
    COMPCOLL_HD static uint16_t narrowed(float value) {
        constexpr int32_t float_infinity = 0x7f800000, overflow = 0x47800000 /* 2^16 */, smallest_normal = 0x38800000 /* 2^-14 */;
        constexpr int32_t rebias = (127 - 15) << 23;
        constexpr uint32_t half = 0x3f000000;  // 1/2: adjacent floats there are as far apart as float16's subnormal numbers
        const uint32_t bits = bits_as<uint32_t>(value);
        const int32_t magnitude = static_cast<int32_t>(bits & 0x7fffffff);
        const int32_t bounded = magnitude < overflow ? magnitude : overflow;
        const int32_t normal = (bounded - rebias + 0xfff + ((bounded >> 13) & 1)) >> 13;
        const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + bits_as<float>(half)) - half;
        const uint32_t nan = 0x7e00 | (static_cast<uint32_t>(magnitude) >> 13 & 0x1ff);
        const uint32_t finite = chosen(magnitude < smallest_normal, subnormal, static_cast<uint32_t>(normal));
        return static_cast<uint16_t>(chosen(magnitude > float_infinity, nan, finite) | (bits >> 16 & 0x8000));
    }

    COMPCOLL_HD static float widened(uint16_t half_bits) {
        constexpr uint32_t rebias = (127 - 15) << 23, smallest_normal = 0x38800000;
        const uint32_t bits = half_bits, magnitude = bits & 0x7fff, shifted = magnitude << 13;
        const float subnormal = bits_as<float>(shifted + smallest_normal) - bits_as<float>(smallest_normal);
        uint32_t result = chosen(static_cast<int32_t>(magnitude) < 0x0400, bits_as<uint32_t>(subnormal), shifted + rebias);
        result |= static_cast<int32_t>(magnitude) < 0x7c00 ? 0 : 0x7f800000;
        result |= static_cast<int32_t>(magnitude) > 0x7c00 ? 0x00400000 : 0;
        return bits_as<float>(result | (bits & 0x8000) << 16);
    }
};

struct BFloat16 {
    COMPCOLL_HD static uint16_t narrowed(float value) {
        const uint32_t bits = bits_as<uint32_t>(value);
        const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);  // may carry into the exponent, up to infinity's
        const uint32_t nan = bits | 0x00400000;
        return static_cast<uint16_t>((static_cast<int32_t>(bits & 0x7fffffff) > 0x7f800000 ? nan : rounded) >> 16);
    }

    COMPCOLL_HD static float widened(uint16_t bits) { return bits_as<float>(static_cast<uint32_t>(bits) << 16); }
};

// Conversions that are exempt from a GPU's flush-to-zero option.
#if defined(__CUDA_ARCH__)
COMPCOLL_HD float float_of(double value) {
    float result;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(result) : "d"(value));
    return result;
}
COMPCOLL_HD double double_of(float value) {
    double result;
    asm("cvt.f64.f32 %0, %1;" : "=d"(result) : "f"(value));
    return result;
}
#else
COMPCOLL_HD float float_of(double value) { return static_cast<float>(value); }
COMPCOLL_HD double double_of(float value) { return static_cast<double>(value); }
#endif

// A float that rounds to float16 and bfloat16 as `value` does. It keeps 16 significant bits and sets the last one if any bit is
// dropped. That is more than either format has, and still exact down to half of bfloat16's smallest number.
COMPCOLL_HD float to_round_further(double value) {
    constexpr uint64_t dropped = (uint64_t(1) << 37) - 1;
    const uint64_t bits = bits_as<uint64_t>(value);
    const uint64_t any_dropped = ((bits & dropped) + dropped) & (dropped + 1);
    return float_of(bits_as<double>((bits & ~dropped) | any_dropped));
}

COMPCOLL_HD float to_round_further(float value) { return value; }

// A float as a number of the computing type.
template <class T>
COMPCOLL_HD T widened_to(float value) {
    if constexpr (sizeof(T) == 8) return double_of(value);
    else return value;
}

}  // namespace compcoll
