// The int8 codec's arithmetic: symmetric quantization, each value to the nearest of 255 multiples of its block's scale.
//
// Record of a block of m values:  s = M / 127 (little endian), where M is the largest magnitude;  m bytes, each the integer x / s
// rounded to nearest, ties to even, from -127 to 127 in two's complement. Division and product are the IEEE operations.
//
//   block                       s on the wire                                 bytes
//   holds NaN or Inf            NaN                                           0; every value is NaN
//   largest magnitude is tiny   +0                                            0; every value is +0
//   127 · s overflows           the next smaller number                       as otherwise: every value is finite
#pragma once

#include "magnitude.h"

namespace compcoll {

// The codec, with the interface of blocks.h.
template <class T>
struct Int8 {
    using Value = T;
    using Header = T;  // the scale
    static constexpr int bits = 8;
    static constexpr int most = 127;  // the largest magnitude of a code

    COMPCOLL_HD explicit Int8(int) {}

    COMPCOLL_HD static T header(T largest) {
        if (!is_finite(largest)) return quiet_nan<T>();
        if (is_tiny(largest)) return T(0);
        const T scale = largest / T(most);
        if (is_finite(scale * T(most))) return scale;
        return bits_as<T>(bits_as<BitsOf<T>>(scale) - 1);
    }
    COMPCOLL_HD static bool has_codes(T scale) { return is_finite(scale) && biased_exponent(scale) != 0; }
    COMPCOLL_HD static T only_value(T scale) { return is_finite(scale) ? T(0) : quiet_nan<T>(); }

    struct Encoder {
        T scale;

        // Sums of this size have no fraction bits, and their lowest bits are those of the integer.
        COMPCOLL_HD uint8_t code(T x) const {
            constexpr T whole = T(3) * T(uint64_t(1) << (FloatFormat<T>::fraction_bits - 1));
            return static_cast<uint8_t>(bits_as<BitsOf<T>>(x / scale + whole));
        }
    };

    struct Decoder {
        T scale;

        COMPCOLL_HD T value(uint8_t code) const { return T(static_cast<int>(static_cast<signed char>(code))) * scale; }
    };

    template <class Use>
    COMPCOLL_HD void with_encoder(T scale, Use use) const { use(Encoder{scale}); }
    template <class Use>
    COMPCOLL_HD void with_decoder(T scale, Use use) const { use(Decoder{scale}); }
};

}  // namespace compcoll
