// ZFP, one-dimensional, fixed rate: the arithmetic of one block of four values, float32 or float64.
//
// After P. Lindstrom, "Fixed-Rate Compressed Floating-Point Arrays", IEEE TVCG 20 (2014). A block becomes maxbits bits:
//
//   1 bit    0: all values are zero (and the rest of the block is 0); 1: otherwise
//   8 or 11  exponent field: the largest magnitude's exponent field + 1
//   the rest the four values as fixed-point numbers on that common exponent, decorrelated by an integer transform,
//            in negabinary, bit plane by bit plane from the most significant one, cut off when the bits run out
//
// Finite blocks give libzfp's bits. Two rules are our own:
//   - a block with a NaN or an infinity is 1, then the exponent field 0 that libzfp never writes, then zeros; it decodes to four NaNs;
//   - a block whose largest magnitude is below 2^-98 (float64: 2^-962) is a zero block. Exactly below that bound, libzfp's scale
//     2^(30 - exponent) overflows and its output is meaningless; exponent fields below it decode to zeros, too.
// Exponents are read as integers, and no floating-point operation here meets a subnormal. So the bits are the same on a device
// that flushes subnormals.
#pragma once

#include "floats.h"

namespace compcoll::zfp {

constexpr int block_size = 4;

template <class T> using Signed = SignedOf<T>;
template <class T> using Unsigned = BitsOf<T>;

template <class T>
struct Format {
    static constexpr int planes = 8 * sizeof(T), mantissa_bits = FloatFormat<T>::fraction_bits, exponent_bits = planes - 1 - mantissa_bits;
    static constexpr int lowest_exponent = planes - 3;  // 2^-98, or 2^-962
};

template <class T> constexpr int header_bits = 1 + Format<T>::exponent_bits;
template <class T> constexpr int exponent_mask = (1 << Format<T>::exponent_bits) - 1;
template <class T> constexpr int most_maxbits = block_size * Format<T>::planes;
template <class T> constexpr int most_words = most_maxbits<T> / 64;  // 64-bit words for the largest block
template <class T> constexpr Unsigned<T> sign_bit = Unsigned<T>(1) << (Format<T>::planes - 1);

template <class T>
COMPCOLL_HD T power_of_two(int field) { return bits_as<T>(Unsigned<T>(field) << Format<T>::mantissa_bits); }

// --- the common exponent ----------------------------------------------------------------------------------------------------

// The exponent field of the largest magnitude, by the maximum of the upper halves: a processor compares three of them at once.
template <class T>
COMPCOLL_HD int block_exponent(const T (&x)[block_size]) {
    uint32_t largest = 0;
    for (int i = 0; i < block_size; ++i) {
        const auto upper = static_cast<uint32_t>(bits_as<Unsigned<T>>(x[i]) >> (Format<T>::planes - 32)) << 1;
        largest = upper > largest ? upper : largest;
    }
    return static_cast<int>(largest >> (32 - Format<T>::exponent_bits));
}

// --- fixed point: trunc(x · 2^(planes - 2 - exponent)), below 2^(planes - 2) in magnitude ------------------------------------

// `exponent` is the block's largest exponent field, at least lowest_exponent.
template <class T>
COMPCOLL_HD Signed<T> to_fixed(T x, int exponent) {
    using F = Format<T>;
    const Unsigned<T> bits = bits_as<Unsigned<T>>(x);
    const int own = biased_exponent(x);
    Unsigned<T> significand = bits & ((Unsigned<T>(1) << F::mantissa_bits) - 1);
    if (own != 0) significand |= Unsigned<T>(1) << F::mantissa_bits;
    const int below = exponent - (own != 0 ? own : 1);  // subnormals share the exponent of field 1
    const Unsigned<T> magnitude =
        below < F::planes ? (significand << (F::planes - 3 - F::mantissa_bits)) >> below : Unsigned<T>(0);
    return Signed<T>(bits & sign_bit<T> ? 0 - magnitude : magnitude);
}

// The inverse: i · 2^(exponent - bias - (planes - 2) + 1), rounded once, by the conversion. Overflow gives an infinity.
template <class T>
COMPCOLL_HD T from_fixed(Signed<T> i, int exponent) {
    using F = Format<T>;
    const Unsigned<T> bits = bits_as<Unsigned<T>>(T(i));
    if (bits == 0) return T(0);
    const Unsigned<T> sign = bits & sign_bit<T>;
    const int bias = exponent_mask<T> >> 1;
    const int field = biased_exponent(bits_as<T>(bits)) + exponent - bias - (F::planes - 3);
    if (field >= exponent_mask<T>) return bits_as<T>(Unsigned<T>(sign | (Unsigned<T>(exponent_mask<T>) << F::mantissa_bits)));
    const Unsigned<T> mantissa = bits & ((Unsigned<T>(1) << F::mantissa_bits) - 1);
    if (field > 0) return bits_as<T>(Unsigned<T>(sign | (Unsigned<T>(field) << F::mantissa_bits) | mantissa));
    // Only i = ±1 on the lowest exponent comes here: half the smallest normal number.
    return bits_as<T>(Unsigned<T>(sign | (Unsigned<T>(1) << (F::mantissa_bits - 1))));
}

// --- the decorrelating transform, by lifting; sums wrap ----------------------------------------------------------------------

template <class U, class S>
COMPCOLL_HD U half(U a) { return U(S(a) >> 1); }

//        ( 4  4  4  4)
// 1/16 · ( 5  1 -1 -5)
//        (-4  4  4 -4)
//        (-2  6 -6  2)
template <class T>
COMPCOLL_HD void forward_lift(Unsigned<T> (&c)[block_size]) {
    using U = Unsigned<T>;
    using S = Signed<T>;
    U x = c[0], y = c[1], z = c[2], w = c[3];
    x = half<U, S>(x + w); w -= x;
    z = half<U, S>(z + y); y -= z;
    x = half<U, S>(x + z); z -= x;
    w = half<U, S>(w + y); y -= w;
    w += half<U, S>(y);    y -= half<U, S>(w);
    c[0] = x, c[1] = y, c[2] = z, c[3] = w;
}

template <class T>
COMPCOLL_HD void inverse_lift(Unsigned<T> (&c)[block_size]) {
    using U = Unsigned<T>;
    using S = Signed<T>;
    U x = c[0], y = c[1], z = c[2], w = c[3];
    y += half<U, S>(w);    w -= half<U, S>(y);
    y += w;                w = 2 * w - y;
    z += x;                x = 2 * x - z;
    y += z;                z = 2 * z - y;
    w += x;                x = 2 * x - w;
    c[0] = x, c[1] = y, c[2] = z, c[3] = w;
}

// --- negabinary (base -2): small numbers of either sign have leading zeros ---------------------------------------------------

template <class T> constexpr Unsigned<T> negabinary_mask = ~Unsigned<T>(0) / 3 * 2;  // 0xaaaa…

template <class T>
COMPCOLL_HD Unsigned<T> to_negabinary(Unsigned<T> i) { return (i + negabinary_mask<T>) ^ negabinary_mask<T>; }

template <class T>
COMPCOLL_HD Unsigned<T> from_negabinary(Unsigned<T> u) { return (u ^ negabinary_mask<T>) - negabinary_mask<T>; }

// --- the embedded code of one bit plane --------------------------------------------------------------------------------------
// The first `significant` of the four coefficients have a one bit in a higher plane, or precede one that has: their bits are
// written unchanged. For the rest: 1, zeros up to and including the next one bit, and so on; 0 when no one bit is left.
// A one bit of the last coefficient is implied.

// The code of a plane, or the plane of a code.
struct Plane {
    uint32_t bits;
    int length;       // of the code
    int significant;  // after this plane
};

COMPCOLL_HD constexpr Plane encode_plane(uint32_t plane, int significant) {
    Plane code{plane & ((1u << significant) - 1), significant, significant};
    plane >>= significant;
    while (code.significant < block_size) {
        code.bits |= uint32_t(plane != 0) << code.length++;
        if (plane == 0) break;
        while (code.significant < block_size - 1) {
            const uint32_t bit = plane & 1;
            code.bits |= bit << code.length++;
            if (bit) break;
            plane >>= 1;
            ++code.significant;
        }
        plane >>= 1;
        ++code.significant;
    }
    return code;
}

constexpr int longest_plane_code = 7;

// Read at most `budget` bits. If the budget ends a search for a one bit, that bit is where the search stopped, as in libzfp.
COMPCOLL_HD constexpr Plane decode_plane(uint32_t code, int significant, int budget) {
    const int plain = significant < budget ? significant : budget;
    Plane plane{code & ((1u << plain) - 1), plain, significant};
    while (plane.significant < block_size && plane.length < budget) {
        if ((code >> plane.length++ & 1) == 0) break;
        while (plane.significant < block_size - 1 && plane.length < budget) {
            if (code >> plane.length++ & 1) break;
            ++plane.significant;
        }
        plane.bits |= 1u << plane.significant++;
    }
    return plane;
}

// --- a few words as a string of bits, the lowest bit first -------------------------------------------------------------------
// Once the loops are unrolled, all word indices are constants, so that a GPU keeps the words in registers.

template <int W>
struct Bits {
    uint64_t word[W] = {};

    COMPCOLL_HD void put(int at, uint64_t bits) {  // bits beyond the end are dropped
        for (int w = 0; w < W; ++w) {
            const int shift = at - 64 * w;
            if (shift >= 0 && shift < 64) word[w] |= bits << shift;
            if (shift < 0 && shift > -64) word[w] |= bits >> -shift;
        }
    }

    COMPCOLL_HD uint64_t get(int at) const {  // 64 bits, with zeros after the end
        uint64_t bits = 0;
        for (int w = 0; w < W; ++w) {
            const int shift = at - 64 * w;
            if (shift >= 0 && shift < 64) bits |= word[w] >> shift;
            if (shift < 0 && shift > -64) bits |= word[w] << -shift;
        }
        return bits;
    }

    COMPCOLL_HD Bits without_first(int count) const {  // 0 … 63 bits
        Bits rest;
        for (int w = 0; w < W; ++w) {
            rest.word[w] = word[w] >> count;
            if (w + 1 < W) rest.word[w] |= word[w + 1] << 1 << (63 - count);
        }
        return rest;
    }

    COMPCOLL_HD void truncate(int length) {
        for (int w = 0; w < W; ++w) {
            const int kept = length - 64 * w;
            if (kept <= 0) word[w] = 0;
            else if (kept < 64) word[w] &= (uint64_t(1) << kept) - 1;
        }
    }
};

// --- one block ---------------------------------------------------------------------------------------------------------------

// Fill a block of which only `count` values exist, as libzfp does: x → xxxx, ab → abba, abc → abca.
template <class T>
COMPCOLL_HD void pad_block(T (&x)[block_size], int count) {
    if (count <= 0) x[0] = T(0);
    if (count <= 1) x[1] = x[0];
    if (count <= 2) x[2] = x[1];
    if (count <= 3) x[3] = x[0];
}

template <class T>
COMPCOLL_HD uint32_t plane_of(const Unsigned<T> (&c)[block_size], int k) {
    uint32_t plane = 0;
    for (int i = 0; i < block_size; ++i) plane |= uint32_t(c[i] >> k & 1) << i;
    return plane;
}

// Return the first maxbits bits of a finite block that is not below the lowest exponent; W words must hold them. The rest is zero.
template <class T, int W>
COMPCOLL_HD Bits<W> encode_block(const T (&x)[block_size], int maxbits) {
    Bits<W> out;
    const int exponent = block_exponent(x);
    Unsigned<T> c[block_size];
    for (int i = 0; i < block_size; ++i) c[i] = Unsigned<T>(to_fixed(x[i], exponent));
    forward_lift<T>(c);
    for (int i = 0; i < block_size; ++i) c[i] = to_negabinary<T>(c[i]);

    out.put(0, 2 * uint64_t(exponent + 1) + 1);
    int at = header_bits<T>, significant = 0;
    for (int k = Format<T>::planes - 1; k >= 0 && at < maxbits; --k) {
        const Plane code = encode_plane(plane_of<T>(c, k), significant);
        out.put(at, code.bits);
        at += code.length;
        significant = code.significant;
    }
    out.truncate(maxbits);
    return out;
}

// A total function: any bits are a valid block.
template <class T, int W>
COMPCOLL_HD void decode_block(const Bits<W>& in, int maxbits, T (&x)[block_size]) {
    const bool something = in.word[0] & 1;
    const int field = int(in.word[0] >> 1) & exponent_mask<T>;
    const int exponent = field - 1;
    if (!something || exponent < Format<T>::lowest_exponent) {
        const Unsigned<T> bits = something && field == 0 ? quiet_nan_bits<T> : 0;
        const T value = bits_as<T>(bits);
        for (int i = 0; i < block_size; ++i) x[i] = value;
        return;
    }
    Unsigned<T> c[block_size] = {};
    int at = header_bits<T>, significant = 0;
    for (int k = Format<T>::planes - 1; k >= 0 && at < maxbits; --k) {
        const Plane plane = decode_plane(uint32_t(in.get(at)), significant, maxbits - at);
        for (int i = 0; i < block_size; ++i) c[i] |= Unsigned<T>(plane.bits >> i & 1) << k;
        at += plane.length;
        significant = plane.significant;
    }
    for (int i = 0; i < block_size; ++i) c[i] = from_negabinary<T>(c[i]);
    inverse_lift<T>(c);
    for (int i = 0; i < block_size; ++i) x[i] = from_fixed<T>(Signed<T>(c[i]), exponent);
}

}  // namespace compcoll::zfp
