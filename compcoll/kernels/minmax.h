// The minmax codec's arithmetic: each value is rounded to the nearest of 2^bits levels between its block's smallest and largest
// value, both included. (ByteGrad, of BAGUA, is this codec with 8 bits.)
//
// Record of a block of m values:  lo, hi (little endian);  m codes of `bits` bits, first code in the lowest bits,
// ceil(m·bits/8) bytes, unused bits zero.
//
//   block                       lo, hi on the wire            code of x                         value of a code
//   holds NaN or Inf            NaN, NaN                      0                                 NaN
//   hi - lo is tiny             lo, lo                        0                                 lo, bit by bit
//   otherwise                   lo, hi                        ⌊(x - lo)·(levels/r) + 1/2⌋       lo + code·(r/levels)
//   hi - lo is huge or Inf      lo, hi                        the same on x/8, lo/8, hi/8       8·min(value, hi/8)
//
// where r = hi - lo and levels = 2^bits - 1. "Tiny" is chosen so that no subnormal x or result can change a code, and
// "huge" so that neither levels/r nor a decoded value leaves the normal range. So the bytes are the same on machines that
// flush subnormals to zero. For the same reason a bound that is -0 or subnormal is sent as +0.
#pragma once

#include "floats.h"

namespace compcoll {

// Biased exponents of r.
template <class T> constexpr int tiny_below = FloatFormat<T>::bias - (sizeof(T) == 8 ? 900 : 90);
template <class T> constexpr int huge_from = 2 * FloatFormat<T>::bias - 2;

// The bounds of a block as stored in its record.
template <class T>
struct Bounds {
    T lo, hi;

    COMPCOLL_HD bool finite() const { return is_finite(lo) && is_finite(hi); }
    COMPCOLL_HD bool equal() const { return bits_as<BitsOf<T>>(lo) == bits_as<BitsOf<T>>(hi); }
    COMPCOLL_HD bool huge() const { return biased_exponent(hi - lo) >= huge_from<T>; }
};

// From a block's smallest and largest value, which are ignored unless all values are finite.
template <class T>
COMPCOLL_HD Bounds<T> bounds_on_wire(T smallest, T largest, bool all_finite) {
    if (!all_finite) return {quiet_nan<T>(), quiet_nan<T>()};
    const T lo = without_subnormals(smallest);
    if (biased_exponent(largest - smallest) < tiny_below<T>) return {lo, lo};
    return {lo, without_subnormals(largest)};
}

// Codes of a block whose bounds are finite and differ. A code cannot exceed levels: x - lo <= r, and the three roundings
// move t by less than a half.
template <class T, bool huge>
struct Quantizer {
    T origin, scale;

    COMPCOLL_HD Quantizer(Bounds<T> bounds, int levels) {
        const T shrink = huge ? T(0.125) : T(1);
        origin = without_subnormals(bounds.lo * shrink);
        scale = T(levels) / (bounds.hi * shrink - origin);
    }

    COMPCOLL_HD uint8_t code(T x) const {
        const T t = ((huge ? x * T(0.125) : x) - origin) * scale;
        return static_cast<uint8_t>(static_cast<int>(t + T(0.5)));
    }
};

// Values of codes. Bounds that no encoder sends give meaningless numbers.
template <class T, bool huge>
struct Dequantizer {
    T origin, step, top;

    COMPCOLL_HD Dequantizer(Bounds<T> bounds, int levels) {
        const T shrink = huge ? T(0.125) : T(1);
        origin = huge ? without_subnormals(bounds.lo * shrink) : bounds.lo;
        top = bounds.hi * shrink;
        step = (top - origin) / T(levels);
    }

    COMPCOLL_HD T value(uint8_t code) const {
        const T value = origin + T(static_cast<int>(code)) * step;
        return huge ? T(8) * (value < top ? value : top) : value;
    }
};

// The codec, with the interface of blocks.h.
template <class T>
struct MinMax {
    using Value = T;
    using Header = Bounds<T>;
    int bits;

    COMPCOLL_HD explicit MinMax(int first) : bits(first) {}

    COMPCOLL_HD int levels() const { return (1 << bits) - 1; }
    COMPCOLL_HD static bool has_codes(Header bounds) { return bounds.finite() && !bounds.equal(); }
    COMPCOLL_HD static T only_value(Header bounds) { return bounds.finite() ? bounds.lo : quiet_nan<T>(); }

    template <class Use>
    COMPCOLL_HD void with_encoder(Header bounds, Use use) const {
        if (bounds.huge()) use(Quantizer<T, true>(bounds, levels()));
        else use(Quantizer<T, false>(bounds, levels()));
    }
    template <class Use>
    COMPCOLL_HD void with_decoder(Header bounds, Use use) const {
        if (bounds.huge()) use(Dequantizer<T, true>(bounds, levels()));
        else use(Dequantizer<T, false>(bounds, levels()));
    }
};

}  // namespace compcoll
