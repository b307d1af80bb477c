// The cast codec's arithmetic: one value from a floating-point format to a shorter one, and back.
//
// Rounding is to nearest, ties to even, once; what is too large becomes Inf, and NaN stays NaN (quiet, with the upper
// bits of its payload). All is done on the bits, except below the shorter format's normal range: there one addition
// of normal numbers rounds or scales, so that nothing depends on whether the machine flushes subnormals to zero.
#pragma once

#include "portable.h"

namespace compcoll {

// A format of sign, exponent and fraction. Magnitudes (bits without the sign) are held in a signed type, whose
// comparisons every vector unit has.
template <class BitsType, class MagnitudeType, int exponent_bits_, int fraction_bits_>
struct Format {
    using Bits = BitsType;
    using Magnitude = MagnitudeType;
    static constexpr int exponent_bits = exponent_bits_;
    static constexpr int fraction_bits = fraction_bits_;
    static constexpr int bias = (1 << (exponent_bits - 1)) - 1;
    static constexpr Magnitude quiet = Magnitude(1) << (fraction_bits - 1);
    static constexpr Magnitude infinity = ((Magnitude(1) << exponent_bits) - 1) << fraction_bits;
    static constexpr Magnitude largest_magnitude = infinity | (quiet | (quiet - 1));
};

struct Float16 : Format<uint16_t, int32_t, 5, 10> {};
struct BFloat16 : Format<uint16_t, int32_t, 8, 7> {};
struct Float32 : Format<uint32_t, int32_t, 8, 23> { using Value = float; };
struct Float64 : Format<uint64_t, int64_t, 11, 52> { using Value = double; };

template <class T>
struct FormatOf;
template <>
struct FormatOf<float> { using type = Float32; };
template <>
struct FormatOf<double> { using type = Float64; };

// What lies between a format and a longer one with at least the same range.
template <class Short, class Long>
struct Gap {
    using Bits = typename Long::Bits;
    using Magnitude = typename Long::Magnitude;
    static constexpr int fraction = Long::fraction_bits - Short::fraction_bits;
    static constexpr int sign = int(sizeof(typename Long::Bits) - sizeof(typename Short::Bits)) * 8;
    static constexpr Magnitude exponent = Magnitude(Long::bias - Short::bias) << Long::fraction_bits;
    static constexpr bool same_range = exponent == 0;
    // As Long has them: the first magnitude that Short has not, and Short's smallest normal one.
    static constexpr Magnitude overflow = (Magnitude(Short::infinity) << fraction) + exponent;
    static constexpr Magnitude normal = exponent + (Magnitude(1) << Long::fraction_bits);
    // The power of two whose neighbours in Long are as far apart as Short's subnormal numbers.
    static constexpr Magnitude coarse = normal + (Magnitude(fraction) << Long::fraction_bits);
};

COMPCOLL_HD int32_t less_mask(int32_t left, int32_t right) { return -static_cast<int32_t>(left < right); }
COMPCOLL_HD int64_t less_mask(int64_t left, int64_t right) {
    return -static_cast<int64_t>(static_cast<uint64_t>(left - right) >> 63);
}

// a where left < right, else b; all not negative. Without a branch or a comparison, so that any vectorizer takes it.
template <class Magnitude>
COMPCOLL_HD Magnitude where_less(Magnitude left, Magnitude right, Magnitude a, Magnitude b) {
    return b ^ ((a ^ b) & less_mask(left, right));
}

// The bits of `value` in the format Short.
template <class Short, class T>
COMPCOLL_HD typename Short::Bits narrowed(T value) {
    using Long = typename FormatOf<T>::type;
    using Step = Gap<Short, Long>;
    using Magnitude = typename Long::Magnitude;
    const auto bits = bits_as<typename Long::Bits>(value);
    const auto magnitude = static_cast<Magnitude>(bits) & Long::largest_magnitude;

    const Magnitude bounded = where_less<Magnitude>(magnitude, Step::overflow, magnitude, Step::overflow);
    const Magnitude below_half = (Magnitude(1) << (Step::fraction - 1)) - 1 + ((bounded >> Step::fraction) & 1);
    Magnitude result = (bounded - Step::exponent + below_half) >> Step::fraction;
    if constexpr (!Step::same_range) {
        constexpr Magnitude coarse = Step::coarse;
        const Magnitude subnormal = bits_as<Magnitude>(bits_as<T>(magnitude) + bits_as<T>(coarse)) - coarse;
        result = where_less<Magnitude>(magnitude, Step::normal, subnormal, result);
    }
    const Magnitude nan = Short::infinity | Short::quiet | ((magnitude >> Step::fraction) & (Short::quiet - 1));
    result = where_less<Magnitude>(Long::infinity, magnitude, nan, result);

    const auto sign = static_cast<typename Long::Bits>(bits ^ static_cast<typename Long::Bits>(magnitude));
    return static_cast<typename Short::Bits>((sign >> Step::sign) | static_cast<typename Long::Bits>(result));
}

// The value whose bits in the format Short are `bits`.
template <class T, class Short>
COMPCOLL_HD T widened(typename Short::Bits bits) {
    using Long = typename FormatOf<T>::type;
    using Step = Gap<Short, Long>;
    using Magnitude = typename Long::Magnitude;
    const auto long_bits = static_cast<typename Long::Bits>(bits);
    if constexpr (Step::same_range) {
        return bits_as<T>(static_cast<typename Long::Bits>(long_bits << Step::fraction));
    } else {
        const Magnitude magnitude = static_cast<Magnitude>(long_bits) & Short::largest_magnitude;
        const Magnitude shifted = magnitude << Step::fraction;
        constexpr Magnitude normal = Step::normal, one = Magnitude(1) << Long::fraction_bits;
        const T subnormal = bits_as<T>(shifted + normal) - bits_as<T>(normal);
        constexpr Magnitude infinity = Magnitude(Short::infinity) << Step::fraction;
        Magnitude result = shifted + Step::exponent;
        result = where_less<Magnitude>(shifted, one, bits_as<Magnitude>(subnormal), result);
        result = where_less<Magnitude>(shifted, infinity, result, shifted | Long::infinity);
        result |= Long::quiet & less_mask(infinity, shifted);
        const auto sign = static_cast<typename Long::Bits>(long_bits ^ static_cast<typename Long::Bits>(magnitude));
        return bits_as<T>(static_cast<typename Long::Bits>((sign << Step::sign) | static_cast<typename Long::Bits>(result)));
    }
}

}  // namespace compcoll
