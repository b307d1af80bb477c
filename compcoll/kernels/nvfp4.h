// NVFP4: 4-bit floats with a scale of 8 bits for each group of 16 values, and a float32 scale for a block of 1024.
//
// "Pretraining Large Language Models with NVFP4" (NVIDIA, 2025), where the second scale is that of a whole tensor.
//
// Record of a block of m values:  S = M / (6·448) (float32, little endian), where M is the block's largest magnitude;  64 bytes, the
// scale of each group in E4M3, (largest magnitude / 6) / S, and 0 for groups beyond m;  m codes of 4 bits in E2M1, x / (scale·S),
// first code in the lowest bits. All of them are rounded to nearest, ties to even, and bounded to the largest finite number.
//
//   block                       S on the wire                                 scales and codes
//   holds NaN or Inf            NaN                                           0; every value is NaN
//   M is below 2^-80            +0                                            0; every value is +0
//   6·448·S overflows           2 units in the last place smaller             as otherwise: every value is finite
//   S overflows (float64)       the largest float                             as otherwise: values are bounded
//
// A group whose scale is 0 has codes of 0, with the sign of the value. With rotation (hadamard.h), each 32 values are rotated before they
// are encoded, except the last of a block if there are fewer. Blocks with a rotated run whose values, after rotation, reach 2^120
// (float64: 2^1016) are sent as NaN, since rotating them back might overflow.
#pragma once

#include "mx.h"

namespace compcoll {

constexpr int nvfp4_block = 1024, nvfp4_group = 16, nvfp4_groups = nvfp4_block / nvfp4_group;
constexpr int nvfp4_header_nbytes = 4 + nvfp4_groups;

template <class T>
struct NVFP4 {
    using Element = MXFP4E2M1;
    using Scale = SmallFloat<4, 3>;

    // S of a block whose largest magnitude is this, perhaps after rotation.
    COMPCOLL_HD static float block_scale(T largest, bool rotated) {
        if (!is_in_range(largest, rotated)) return quiet_nan<float>();
        if (exponent_of(largest) < tiny_exponent<float>) return 0.0f;
        const float scale = float_of_any(largest / T(6 * 448));
        if (!is_finite(scale)) return greatest_finite<float>();
        if (is_finite(T(6) * (T(448) * widened_to<T>(scale)))) return scale;
        return bits_as<float>(bits_as<uint32_t>(scale) - 2);
    }
    COMPCOLL_HD static bool has_codes(float scale) { return is_finite(scale) && biased_exponent(scale) != 0; }
    COMPCOLL_HD static T only_value(float scale) { return is_finite(scale) ? T(0) : quiet_nan<T>(); }

    COMPCOLL_HD static uint8_t group_scale(T largest, float scale) {
        return static_cast<uint8_t>(Scale::narrowed(to_round_further(largest / T(6) / widened_to<T>(scale)), 448.0f));
    }
    // The value of the number 1 in a code.
    COMPCOLL_HD static T unit(uint8_t group_scale, float scale) {
        return widened_to<T>(Scale::widened(group_scale)) * widened_to<T>(scale);
    }
    // The divisor of values before they are encoded.
    COMPCOLL_HD static T divisor(T unit) { return unit == T(0) ? bits_as<T>(infinity_bits<T>) : unit; }
    COMPCOLL_HD static uint32_t code(T x, T divisor) { return Element::code(to_round_further(x / divisor)); }
    COMPCOLL_HD static T value(uint8_t code, T unit) { return widened_to<T>(Element::widened(code)) * unit; }

private:
    COMPCOLL_HD static float float_of_any(float value) { return value; }
    COMPCOLL_HD static float float_of_any(double value) { return float_of(value); }
};

}  // namespace compcoll
