// The mx codec's arithmetic: the formats of "OCP Microscaling Formats (MX) Specification", version 1.0 (2023): a power of two for
// each block of 32 values, and an element type to which the values divided by it are rounded.
//
// Record of a block of m values:  the scale, s + 127, in a byte;  m codes of 8, 6 or 4 bits, first code in the lowest bits. With
// 2^e <= M < 2^(e+1) for the largest magnitude M, s = e - emax, where 2^emax is the largest power of two that the element type
// has. s is bounded to -127 … 127; a code is x / 2^s rounded to nearest, ties to even, and bounded to the largest finite number.
//
//   block                       scale                                         codes
//   holds NaN or Inf            255                                           0; every value is NaN
//   all values are 0            0                                             0, with the sign of the value (not MXINT8)
//
// With rotation, full blocks are rotated (hadamard.h) before they are encoded; a short last block is not. 255 also stands for
// blocks whose rotated values are 2^120 or larger (float64: 2^1016), since rotating them back might overflow.
#pragma once

#include "hadamard.h"
#include "magnitude.h"
#include "small_floats.h"

namespace compcoll {

// Elements: `emax`; the largest number, times 2; conversions of floats.
template <int exponent_bits, int fraction_bits, int emax_, int twice_most>
struct FloatElement : SmallFloat<exponent_bits, fraction_bits> {
    static constexpr int bits = 1 + exponent_bits + fraction_bits, emax = emax_;
    COMPCOLL_HD static uint32_t code(float value) { return SmallFloat<exponent_bits, fraction_bits>::narrowed(value, twice_most / 2.0f); }
};

using MXFP8E4M3 = FloatElement<4, 3, 8, 2 * 448>;
using MXFP8E5M2 = FloatElement<5, 2, 15, 2 * 57344>;
using MXFP6E3M2 = FloatElement<3, 2, 4, 2 * 28>;
using MXFP6E2M3 = FloatElement<2, 3, 2, 15>;
using MXFP4E2M1 = FloatElement<2, 1, 2, 2 * 6>;

// Two's complement with 6 fraction bits. As the specification allows, -2 is not used.
struct MXInt8 {
    static constexpr int bits = 8, emax = 0;

    COMPCOLL_HD static uint32_t code(float value) {
        constexpr float largest = 127 / 64.0f, whole = 3.0f * (1 << 16);  // sums of this size have 6 fraction bits
        value = value < largest ? value : largest;
        value = value > -largest ? value : -largest;
        return bits_as<uint32_t>(value + whole) & 0xff;
    }
    COMPCOLL_HD static float widened(uint8_t code) {
        return static_cast<float>(static_cast<int>(static_cast<signed char>(code))) / 64.0f;
    }
};

constexpr int mx_block = rotated_values, mx_rotation = 8;  // of `first`

// `first` without mx_rotation: 0 to 2 have 8 bits, 3 and 4 have 6, 5 has 4.
COMPCOLL_HD constexpr int mx_bits(int first) { return first % mx_rotation < 3 ? 8 : first % mx_rotation < 5 ? 6 : 4; }

template <class Use>
COMPCOLL_HD void with_element(int first, Use use) {
    switch (first % mx_rotation) {
        case 0: return use(MXFP8E4M3());
        case 1: return use(MXFP8E5M2());
        case 2: return use(MXInt8());
        case 3: return use(MXFP6E3M2());
        case 4: return use(MXFP6E2M3());
        default: return use(MXFP4E2M1());
    }
}

// 2^(scale - 127) for a scale of 0 … 254; 2^-127 is a subnormal float.
template <class T>
COMPCOLL_HD T mx_scale(int scale) {
    if constexpr (sizeof(T) == 8) {
        return power_of_two<T>(scale - 127);
    } else {
        const int32_t bits = scale * (1 << 23), subnormal = 1 << 22;
        return bits_as<T>(bits > subnormal ? bits : subnormal);
    }
}

// The same, but 2^-126 for 0.
template <class T>
COMPCOLL_HD T mx_normal_scale(int scale) {
    return power_of_two<T>((scale == 0 ? 1 : scale) - 127);
}

// The codec, with the interface of blocks.h.
template <class T>
struct MX {
    using Value = T;
    using Header = uint8_t;  // the scale
    static constexpr Header nan = 255;
    int first, bits;

    COMPCOLL_HD explicit MX(int first) : first(first), bits(mx_bits(first)) {}

    COMPCOLL_HD bool rotates(size_t length) const { return first >= mx_rotation && length == mx_block; }
    // The scale of a block whose largest magnitude, perhaps after rotation, is this.
    template <class Element>
    COMPCOLL_HD static Header header(T largest, bool rotated) {
        const int scale = exponent_of(largest) - Element::emax + 127, bounded = scale < 0 ? 0 : scale;
        // Only doubles have larger exponents.
        return static_cast<Header>(!is_in_range(largest, rotated) ? nan : sizeof(T) == 8 && bounded > 254 ? 254 : bounded);
    }
    COMPCOLL_HD Header header(T largest, bool rotated) const {
        Header scale = nan;
        with_element(first, [&](auto element) { scale = header<decltype(element)>(largest, rotated); });
        return scale;
    }
    COMPCOLL_HD static bool has_codes(Header scale) { return scale != nan; }
    COMPCOLL_HD static T only_value(Header) { return quiet_nan<T>(); }

    // Both multiply by the factor, but in two steps by normal numbers, so that a processor that flushes subnormal ones does, too.
    template <class Element>
    struct Encoder {
        T factor, normal, rest;

        COMPCOLL_HD explicit Encoder(Header scale)
            : factor(mx_scale<T>(254 - scale)), normal(mx_normal_scale<T>(254 - scale)), rest(scale == 254 ? T(0.5) : T(1)) {}
        COMPCOLL_HD uint32_t code(T x) const {
            return Element::code(to_round_further(exact_product(exact_product(x, normal), rest)));
        }
    };

    template <class Element>
    struct Decoder {
        T factor, normal, rest;

        COMPCOLL_HD explicit Decoder(Header scale)
            : factor(mx_scale<T>(scale)), normal(mx_normal_scale<T>(scale)), rest(scale == 0 ? T(0.5) : T(1)) {}
        COMPCOLL_HD T value(uint8_t code) const {
            return exact_product(exact_product(widened_to<T>(Element::widened(code)), normal), rest);
        }
    };

    template <class Use>
    COMPCOLL_HD void with_encoder(Header scale, Use use) const {
        with_element(first, [&](auto element) { use(Encoder<decltype(element)>(scale)); });
    }
    template <class Use>
    COMPCOLL_HD void with_decoder(Header scale, Use use) const {
        with_element(first, [&](auto element) { use(Decoder<decltype(element)>(scale)); });
    }
};

}  // namespace compcoll
