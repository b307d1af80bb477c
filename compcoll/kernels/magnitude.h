// Values of a block relative to its largest magnitude M, 2^e <= M < 2^(e+1): fixed-point numbers, whose sums do not depend on the
// order of additions.
#pragma once

#include "floats.h"

namespace compcoll {

// Blocks with a smaller magnitude are encoded as zeros. In all other blocks, no result can become subnormal.
template <class T> constexpr int tiny_exponent = sizeof(T) == 8 ? -900 : -80;

template <class T>
COMPCOLL_HD int exponent_of(T value) {
    return biased_exponent(value) - FloatFormat<T>::bias;
}

template <class T>
COMPCOLL_HD bool is_tiny(T magnitude) {
    return exponent_of(magnitude) < tiny_exponent<T>;
}

// Return M / 2^e, exactly.
template <class T>
COMPCOLL_HD double mantissa_of(T value) {
    constexpr auto fraction = (BitsOf<T>(1) << FloatFormat<T>::fraction_bits) - 1;
    return static_cast<double>(bits_as<T>((bits_as<BitsOf<T>>(value) & fraction) | bits_as<BitsOf<T>>(T(1))));
}

// ⌊|x|·2^(20-e)⌋, for a block whose largest magnitude is at least 2^e and less than 2^(e+1).
template <class T>
struct FixedPoint {
    static constexpr int fraction_bits = 20;
    T factor;

    COMPCOLL_HD explicit FixedPoint(T largest) : factor(power_of_two<T>(fraction_bits - exponent_of(largest))) {}

    // Rounded toward zero.
    COMPCOLL_HD int32_t of(T x) const { return static_cast<int32_t>(x * factor); }
    COMPCOLL_HD uint64_t square(T x) const {
        const int32_t q = of(x);
        const uint32_t magnitude = static_cast<uint32_t>(q < 0 ? -q : q);
        return static_cast<uint64_t>(magnitude) * magnitude;
    }
};

}  // namespace compcoll
