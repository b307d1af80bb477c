// The qsgd codec's arithmetic: each value is rounded to one of evenly spaced levels between -norm and norm of its block, at random
// so that the mean is the value, or to the nearest. (TernGrad is this codec with 2 bits and the largest magnitude as norm.)
//
// Record of a block of m values:  h (little endian);  m codes of `bits` bits, first code in the lowest bits,
// ceil(m·bits/8) bytes, unused bits zero. A code c stands for (2c - levels)·h, where levels = 2^bits - 2, so that one code
// stands for 0; with 1 bit levels = 1, and the codes stand for -h and h.
//
//   block                       h on the wire                       code of x
//   holds NaN or Inf            NaN                                 0; every value is NaN
//   largest magnitude is tiny   0                                   0; every value is +0
//   otherwise                   norm/levels, or a bit less where    ⌊(t + u) / 2^16⌋ with t = ⌊x·(2^15/h) + 2^15·levels + 1/2⌋
//                               levels·h would be infinite          between 0 and 2^16·levels, u: 16 random bits, or 2^15
//
// norm is the largest magnitude M, or the root of the sum of squares. That sum uses integers, so that the order of additions does
// not matter: with 2^e <= M < 2^(e+1) and q = ⌊|x|·2^(20-e)⌋ the norm is max(√(Σ q²)·2^-20, M/2^e)·2^e. Any norm of at least M
// keeps the mean.
#pragma once

#include "magnitude.h"

#if !defined(__CUDACC_RTC__)
#include <cmath>
#endif

namespace compcoll {

// Bits of a variant.
constexpr int qsgd_euclidean = 1, qsgd_nearest = 2;

constexpr uint16_t qsgd_half = 0x8000;  // the "random" number that rounds to nearest

template <class T>
struct StochasticQuantizer {
    T factor, middle;
    int32_t top;

    COMPCOLL_HD StochasticQuantizer(T h, int levels)
        : factor(T(32768) / h), middle(T(32768 * levels) + T(0.5)), top(levels << 16) {}

    COMPCOLL_HD uint8_t code(T x, uint16_t random = qsgd_half) const {
        const int32_t t = static_cast<int32_t>(x * factor + middle);
        const int32_t low = t < 0 ? 0 : t, bounded = low > top ? top : low;
        return static_cast<uint8_t>((bounded + random) >> 16);
    }
};

template <class T>
struct StochasticDequantizer {
    T h;
    int levels;

    COMPCOLL_HD T value(uint8_t code) const { return static_cast<T>(2 * static_cast<int>(code) - levels) * h; }
};

// The codec, with the interface of blocks.h.
template <class T>
struct QSGD {
    using Value = T;
    using Header = T;  // h
    int bits;

    COMPCOLL_HD explicit QSGD(int first) : bits(first) {}

    COMPCOLL_HD int levels() const { return bits == 1 ? 1 : (1 << bits) - 2; }

    // h of a block with this largest magnitude; sum_of_squares(fixed) is the sum of fixed.square of all values.
    template <class SumOfSquares>
    COMPCOLL_HD T header(T largest, int variant, SumOfSquares sum_of_squares) const {
        if (!is_finite(largest)) return quiet_nan<T>();
        if (is_tiny(largest)) return T(0);
        double norm = mantissa_of(largest);
        if (variant & qsgd_euclidean) {
            using Fixed = FixedPoint<T>;
            const double root = sqrt(static_cast<double>(sum_of_squares(Fixed(largest)))) * (1.0 / (1 << Fixed::fraction_bits));
            norm = root > norm ? root : norm;
        }
        const T h = static_cast<T>(norm / levels()) * power_of_two<T>(exponent_of(largest));
        const T most = bits_as<T>(bits_as<BitsOf<T>>(greatest_finite<T>() / T(levels())) - 1);
        return h < most ? h : most;
    }
    COMPCOLL_HD static bool has_codes(T h) { return is_finite(h) && biased_exponent(h) != 0; }
    COMPCOLL_HD static T only_value(T h) { return is_finite(h) ? T(0) : quiet_nan<T>(); }

    template <class Use>
    COMPCOLL_HD void with_encoder(T h, Use use) const { use(StochasticQuantizer<T>(h, levels())); }
    template <class Use>
    COMPCOLL_HD void with_decoder(T h, Use use) const { use(StochasticDequantizer<T>{h, levels()}); }
};

}  // namespace compcoll
