// Floating-point formats of up to 8 bits: sign, exponent, fraction. The conversions know no Inf and no NaN.
#pragma once

#include "cast.h"

namespace compcoll {

template <int exponent_bits_, int fraction_bits_>
struct SmallFloat {
    static constexpr int exponent_bits = exponent_bits_, fraction_bits = fraction_bits_;
    static constexpr int bias = (1 << (exponent_bits - 1)) - 1;
    static constexpr int magnitude_bits = exponent_bits + fraction_bits;
    static constexpr uint32_t sign = uint32_t(1) << magnitude_bits;

    // Round the magnitude of a float to nearest, ties to even: bits of the float without its sign, to those of the format.
    COMPCOLL_HD static int32_t rounded(int32_t magnitude) {
        constexpr int dropped = 23 - fraction_bits;
        constexpr int32_t smallest_normal = (127 - bias + 1) << 23;
        const int32_t exponent = magnitude & 0x7f800000, bounded = exponent > smallest_normal ? exponent : smallest_normal;
        // Adjacent floats there are as far apart as the format's numbers of this exponent.
        const int32_t coarse = bounded + (dropped << 23);
        const auto sum = bits_as<int32_t>(bits_as<float>(magnitude) + bits_as<float>(coarse));
        return sum - coarse + ((bounded - smallest_normal) >> dropped);
    }
    COMPCOLL_HD static int32_t magnitude_of(float value) { return bits_as<int32_t>(value) & 0x7fffffff; }
    COMPCOLL_HD static uint32_t with_sign_of(float value, int32_t magnitude) {
        return static_cast<uint32_t>(magnitude) | (bits_as<uint32_t>(value) >> (31 - magnitude_bits) & sign);
    }
    // The number nearest to a value, bounded to magnitudes of at most `most`.
    COMPCOLL_HD static uint32_t narrowed(float value, float most) {
        const int32_t magnitude = magnitude_of(value), bound = bits_as<int32_t>(most);
        return with_sign_of(value, rounded(magnitude < bound ? magnitude : bound));
    }

    COMPCOLL_HD static float widened(uint8_t code) {
        constexpr uint32_t rebias = static_cast<uint32_t>(127 - bias) << 23, smallest_normal = static_cast<uint32_t>(127 - bias + 1) << 23;
        const uint32_t bits = code, shifted = (bits & (sign - 1)) << (23 - fraction_bits);
        const float subnormal = bits_as<float>(shifted + smallest_normal) - bits_as<float>(smallest_normal);
        const bool small = static_cast<int32_t>(bits & (sign - 1)) < (1 << fraction_bits);
        return bits_as<float>(chosen(small, bits_as<uint32_t>(subnormal), shifted + rebias) | (bits & sign) << (31 - magnitude_bits));
    }
};

}  // namespace compcoll
