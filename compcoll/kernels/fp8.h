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

#include "magnitude.h"
#include "small_floats.h"

namespace compcoll {

// A format of 8 bits, by its number of fraction bits. Values to round are below 2·2^top.
template <int fraction_bits>
struct Float8 : SmallFloat<7 - fraction_bits, fraction_bits> {
    using Base = SmallFloat<7 - fraction_bits, fraction_bits>;
    static constexpr int top = Base::exponent_bits == 4 ? 7 : 14;
    // The largest code of a value below 2·2^top.
    static constexpr uint8_t below_overflow = static_cast<uint8_t>(((top + Base::bias + 1) << fraction_bits) - 1);
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
        COMPCOLL_HD uint8_t code(T x) const {
            const float value = to_round_further(x * factor);
            const int32_t magnitude = Format::rounded(Format::magnitude_of(value));
            return static_cast<uint8_t>(Format::with_sign_of(value, magnitude < most ? magnitude : most));
        }
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
