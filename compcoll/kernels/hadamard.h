// A rotation of 32 values, which spreads a large one over all of them: y = H·D·x/√32, where H is the Hadamard matrix (Sylvester's)
// and D changes signs. H·x is computed in five steps, for distances d of 16, 8, 4, 2, 1: x[i] + x[i+d] and x[i] - x[i+d] replace
// x[i] and x[i+d] (where i / d is even).
#pragma once

#include "floats.h"

namespace compcoll {

constexpr int rotated_values = 32;
template <class T> constexpr T one_over_root_32 = T(0.17677669529663689);
constexpr uint32_t flipped_signs = 0x243f6a88;  // the first bits of π's fraction; the lowest bit is for the first value

template <class T>
COMPCOLL_HD void flip_signs(T (&x)[rotated_values]) {
    for (int i = 0; i < rotated_values; ++i)
        x[i] = bits_as<T>(static_cast<BitsOf<T>>(bits_as<BitsOf<T>>(x[i]) ^ BitsOf<T>(flipped_signs >> i & 1) << (8 * sizeof(T) - 1)));
}

// Whether a block's largest magnitude is finite; of rotated values, whether it is below 2^120 (double: 2^1016), so that rotating back
// cannot overflow.
template <class T>
COMPCOLL_HD bool is_in_range(T largest, bool rotated) {
    return biased_exponent(largest) < 2 * FloatFormat<T>::bias + (rotated ? -7 : 1);
}

}  // namespace compcoll
