// The fp8 codec's arithmetic: values divided by a power of two of their block, in a format of 8 bits.
//
// "FP8 Formats for Deep Learning" (P. Micikevicius et al., 2022): e4m3 has 4 exponent bits and reaches 448, e5m2 has 5 and
// reaches 57344. Rounding is to nearest, ties to even.
//
// Record of a block of m values:  16 bits, the biased exponent of the largest magnitude M (little endian);  m bytes, each the
// format's bits of x·2^(top-e), where 2^e <= M < 2^(e+1) and top = 7 for e4m3, 14 for e5m2: values that are rounded up stay finite.
//
//   block                       exponent on the wire                          bytes
//   holds NaN or Inf            that of NaN: all ones                         0; every value is NaN
//   largest magnitude is tiny   0                                             0; every value is +0
//   e is the largest exponent   as otherwise                                  below 2·2^top, which would decode to infinity
#pragma once

#include "cast.h"
#include "magnitude.h"

namespace compcoll {

// A format of 8 bits, by its number of fraction bits.
template <int fraction_bits_>
struct Float8 {
    static constexpr int fraction_bits = fraction_bits_, exponent_bits = 7 - fraction_bits;
    static constexpr int bias = (1 << (exponent_bits - 1)) - 1;
    static constexpr int top = exponent_bits == 4 ? 7 : 14;
    // The largest code of a value below 2·2^top.
    static constexpr uint8_t below_overflow = static_cast<uint8_t>(((top + bias + 1) << fraction_bits) - 1);

    // Round a float below 2^(top+1); `most` bounds the bits of the magnitude.
    COMPCOLL_HD static uint8_t narrowed(float value, int32_t most) {
        constexpr int dropped = 23 - fraction_bits;
        constexpr int32_t rebias = (127 - bias) << 23, smallest_normal = (127 - bias + 1) << 23;
        // Adjacent floats there are as far apart as the format's subnormal numbers.
        constexpr uint32_t coarse = static_cast<uint32_t>(127 + 1 - bias - fraction_bits + 23) << 23;
        const uint32_t bits = bits_as<uint32_t>(value);
        const int32_t magnitude = static_cast<int32_t>(bits & 0x7fffffff);
        const int32_t normal = (magnitude - rebias + ((1 << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1)) >> dropped;
        const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + bits_as<float>(coarse)) - coarse;
        const auto code = static_cast<int32_t>(chosen(magnitude < smallest_normal, subnormal, static_cast<uint32_t>(normal)));
        return static_cast<uint8_t>((code < most ? code : most) | static_cast<int32_t>(bits >> 24 & 0x80));
    }

    COMPCOLL_HD static float widened(uint8_t code) {
        constexpr uint32_t rebias = static_cast<uint32_t>(127 - bias) << 23, smallest_normal = static_cast<uint32_t>(127 - bias + 1) << 23;
        const uint32_t bits = code, shifted = (bits & 0x7f) << (23 - fraction_bits);
        const float subnormal = bits_as<float>(shifted + smallest_normal) - bits_as<float>(smallest_normal);
        const bool small = static_cast<int32_t>(bits & 0x7f) < (1 << fraction_bits);
        return bits_as<float>(chosen(small, bits_as<uint32_t>(subnormal), shifted + rebias) | (bits & 0x80) << 24);
    }
};

using E4M3 = Float8<3>;
using E5M2 = Float8<2>;

// The codec, with the interface of blocks.h.
template <class T>
struct FP8 {
    using Value = T;
    using Header = uint16_t;  // biased exponent of the largest magnitude
    static constexpr int bits = 8;
    bool e4m3;

    COMPCOLL_HD explicit FP8(int first) : e4m3(first == E4M3::exponent_bits) {}

    COMPCOLL_HD static Header header(T largest) { return static_cast<Header>(is_tiny(largest) ? 0 : biased_exponent(largest)); }
    COMPCOLL_HD static bool is_nan(Header exponent) { return exponent > 2 * FloatFormat<T>::bias; }
    COMPCOLL_HD static bool has_codes(Header exponent) {
        return exponent >= FloatFormat<T>::bias + tiny_exponent<T> && !is_nan(exponent);
    }
    COMPCOLL_HD static T only_value(Header exponent) { return is_nan(exponent) ? quiet_nan<T>() : T(0); }

    template <class Format>
    struct Encoder {
        T factor;
        int32_t most;

        COMPCOLL_HD explicit Encoder(Header exponent)
            : factor(power_of_two<T>(Format::top + FloatFormat<T>::bias - exponent)),
              most(exponent == 2 * FloatFormat<T>::bias ? Format::below_overflow : Format::below_overflow + 1) {}
        COMPCOLL_HD uint8_t code(T x) const { return Format::narrowed(to_round_further(x * factor), most); }
    };

    template <class Format>
    struct Decoder {
        T factor;

        COMPCOLL_HD explicit Decoder(Header exponent) : factor(power_of_two<T>(exponent - FloatFormat<T>::bias - Format::top)) {}
        COMPCOLL_HD T value(uint8_t code) const { return widened_to<T>(Format::widened(code)) * factor; }
    };

    template <class Use>
    COMPCOLL_HD void with_encoder(Header exponent, Use use) const {
        if (e4m3) use(Encoder<E4M3>(exponent));
        else use(Encoder<E5M2>(exponent));
    }
    template <class Use>
    COMPCOLL_HD void with_decoder(Header exponent, Use use) const {
        if (e4m3) use(Decoder<E4M3>(exponent));
        else use(Decoder<E5M2>(exponent));
    }
};

}  // namespace compcoll
