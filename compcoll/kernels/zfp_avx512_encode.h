// ZFP on AVX-512, encoding: a group of values in four registers (16 blocks of floats, 8 of doubles) becomes bit strings, one per
// block. zfp.h describes the format; the comments here explain how a step works for many blocks at once.
#pragma once

#include "zfp_avx512_lanes.h"

namespace compcoll {
namespace {

// --- from values to coefficients ----------------------------------------------------------------------------------------------

// Coefficients in negabinary, shifted left so that the first nonempty bit plane is the top one.
template <class T>
struct Group {
    V d[4];
    V start;         // position of the first of these planes: after the header and one 0 bit per empty plane
    V header;        // the string's first bits
    V trail[2];      // leading zeros, before the shift, of d1|d2|d3 and d2|d3
    V empty;         // number of empty planes
    Mask<T> coded;   // neither a zero block nor one with a NaN or an infinity; in other lanes d = 0
};

template <class T>
STEP V to_fixed(V x, V scale) {
    if constexpr (single<T>) return _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(scale)));
    else return _mm512_cvttpd_epi64(_mm512_mul_pd(_mm512_castsi512_pd(x), _mm512_castsi512_pd(scale)));
}

// Read the exponents as integers. The product with a power of two is exact wherever it does not truncate to zero.
template <class T>
STEP void to_fixed_point(const T* values, Group<T>& g) {
    using F = zfp::Format<T>;
    V x[4], c[4];
    for (int k = 0; k < 4; ++k) x[k] = load(values + k * group_blocks<T>);
    transpose<T>(x, c);
    const V magnitude = all<T>(int64_t(~zfp::sign_bit<T>));
    const V largest = larger<T>(larger<T>(_mm512_and_si512(c[0], magnitude), _mm512_and_si512(c[1], magnitude)),
                                larger<T>(_mm512_and_si512(c[2], magnitude), _mm512_and_si512(c[3], magnitude)));
    const V exponent = right<T>(largest, F::mantissa_bits);
    const int bias = zfp::exponent_mask<T> / 2;
    const V scale = sub<T>(all<T>(2 * bias + F::planes - 3), exponent);  // 2^(planes - 3 - (exponent - bias))
    for (int i = 0; i < 4; ++i) g.d[i] = to_fixed<T>(c[i], left<T>(scale, F::mantissa_bits));

    const V above = sub<T>(exponent, all<T>(F::lowest_exponent));
    g.coded = below<T>(above, all<T>(zfp::exponent_mask<T> - F::lowest_exponent));
    const auto not_zero = below<T>(above, all<T>(zfp::exponent_mask<T> - F::lowest_exponent + 1));
    // 1, then the field exponent + 1, which wraps to 0 for a NaN or an infinity
    const V bits = add<T>(add<T>(exponent, exponent), all<T>(3));
    g.header = only<T>(not_zero, _mm512_and_si512(bits, all<T>(2 * zfp::exponent_mask<T> + 1)));
}

template <class T>
STEP void decorrelate(Group<T>& g) {
    V x = g.d[0], y = g.d[1], z = g.d[2], w = g.d[3];
    x = half<T>(add<T>(x, w)), w = sub<T>(w, x);
    z = half<T>(add<T>(z, y)), y = sub<T>(y, z);
    x = half<T>(add<T>(x, z)), z = sub<T>(z, x);
    w = half<T>(add<T>(w, y)), y = sub<T>(y, w);
    w = add<T>(w, half<T>(y)), y = sub<T>(y, half<T>(w));
    const V mask = all<T>(int64_t(zfp::negabinary_mask<T>));
    g.d[0] = _mm512_xor_si512(add<T>(x, mask), mask);
    g.d[1] = _mm512_xor_si512(add<T>(y, mask), mask);
    g.d[2] = _mm512_xor_si512(add<T>(z, mask), mask);
    g.d[3] = _mm512_xor_si512(add<T>(w, mask), mask);
}

template <class T>
STEP void skip_empty_planes(Group<T>& g) {
    const V d23 = _mm512_or_si512(g.d[2], g.d[3]);
    const V d123 = _mm512_or_si512(g.d[1], d23);
    g.empty = leading_zeros<T>(_mm512_or_si512(g.d[0], d123));
    g.trail[0] = leading_zeros<T>(d123), g.trail[1] = leading_zeros<T>(d23);
    for (int i = 0; i < 4; ++i) g.d[i] = left_only<T>(g.coded, g.d[i], g.empty);
    g.start = add<T>(g.empty, all<T>(zfp::header_bits<T>));
}

// Compute n, the number of significant coefficients, for all planes at once. r_i = the bits below the top one bit of d_i | … | d_3
// shows where n > i. The r_i are nested, so r_1 is the high bit of min(n, 3), and r_0 ^ r_1 ^ r_2 the low one. (r_0 has all bits
// below the top bit.) Planes beyond the last one are zero, and their codes are zeros for any n.
struct Significance {
    V high, low;
};

template <class T>
STEP V three_significant(const Group<T>& g) {
    return right<T>(all<T>(int64_t(~zfp::sign_bit<T>)), sub<T>(g.trail[1], g.empty));
}

template <class T>
STEP Significance significance(const Group<T>& g) {
    const V r0 = all<T>(int64_t(~zfp::sign_bit<T>));
    const V r1 = right<T>(r0, sub<T>(g.trail[0], g.empty)), r2 = three_significant(g);
    return {r1, ternary<a_xor_b_xor_c>(r0, r1, r2)};
}

// --- octets: eight planes of eight blocks, a bit matrix in each quadword ------------------------------------------------------

// Byte `octet` (from the top) of lanes in two registers becomes bytes `to` and `to - 1` of a lane.
template <class T>
constexpr Bytes<64> byte_pair(int octet, int to) {
    const int size = sizeof(T);
    return bytes([=](int i) {
        const int lane = i / size * size + size - 1 - octet;
        return i % size == to ? lane : i % size == to - 1 ? 64 + lane : 0;
    });
}

template <class T, int octet, int to>
STEP V gather_pair(V a, V b) {
    static constexpr Bytes<64> index = byte_pair<T>(octet, to);
    return _mm512_permutex2var_epi8(a, load(&index), b);
}

constexpr int64_t byte_range(int first, int last) {
    int64_t mask = 0;
    for (int i = first; i <= last; ++i) mask |= int64_t(255) << 8 * i;
    return mask;
}

// [d3 d2 d1 d0] of one octet: one double word per block for floats, the high double word for doubles.
template <class T, int octet>
STEP V four_rows(const V (&d)[4]) {
    constexpr int top = sizeof(T) - 1;
    const V ab = gather_pair<T, octet, top>(d[0], d[1]), cd = gather_pair<T, octet, top - 2>(d[2], d[3]);
    constexpr int64_t low = single<T> ? byte_range(0, 1) | byte_range(4, 5) : byte_range(4, 5);
    return ternary<b_if_c_else_a>(ab, cd, _mm512_set1_epi64(low));
}

// Matrices with rows [- - n1 n0 d3 d2 d1 d0].
template <class T, int octet>
STEP Halves<T> octet_matrices(const V (&d)[4], const Significance& n) {
    return widen<T>(four_rows<T, octet>(d), gather_pair<T, octet, 3>(n.low, n.high));
}

// Matrices with rows [d3 d2 d1 d0] of the even planes and [d3 d2 d1 d0] of the odd ones.
template <class T, int octet>
STEP Halves<T> nibble_matrices(const V (&d)[4]) {
    const V rows = four_rows<T, octet>(d);
    return widen<T>(rows, single<T> ? _mm512_slli_epi32(rows, 1) : _mm512_srli_epi64(rows, 31));
}

// --- codes --------------------------------------------------------------------------------------------------------------------

// Strings in halves of a register's quadwords (or double words), and their lengths.
struct Codes {
    V bits, length;
};

// The codes of four planes in each double word, shortest plane number first. Adjacent codes merge by multiplication: first + second
// · 2^length(first).
STEP Codes four_plane_codes(V matrices) {
    const V index = _mm512_gf2p8affine_epi64_epi8(load(&planes_down), matrices, 0);
    const V code = _mm512_permutexvar_epi8(index, load(&code_bits));
    const V length = _mm512_permutexvar_epi8(index, load(&code_length));
    const V power = _mm512_mask_permutexvar_epi8(ones_epi8(), 0xaaaaaaaaaaaaaaaa, _mm512_slli_epi16(index, 8), load(&code_power));
    const V two_codes = _mm512_maddubs_epi16(power, code);
    const V two_lengths = _mm512_maddubs_epi16(length, ones_epi8());
    const V one = _mm512_set1_epi16(1);
    const V two_powers = _mm512_sllv_epi16(one, _mm512_slli_epi32(two_lengths, 16));
    return {_mm512_madd_epi16(two_codes, two_powers), _mm512_madd_epi16(two_lengths, one)};
}

// The codes of eight planes, at most 56 bits.
STEP Codes eight_plane_codes(V matrices) {
    const Codes four = four_plane_codes(matrices);
    const V first_length = _mm512_and_si512(four.length, low_half());
    const V second = _mm512_sllv_epi64(_mm512_srli_epi64(four.bits, 32), first_length);
    return {ternary<a_or_b_and_c>(second, four.bits, low_half()),
            _mm512_add_epi64(first_length, _mm512_srli_epi64(four.length, 32))};
}

// The codes of eight planes where n ≥ 3: the planes' four bits unchanged.
STEP V low_nibbles(V matrices) { return _mm512_gf2p8affine_epi64_epi8(load(&nibbles_low), matrices, 0); }
STEP V high_nibbles(V matrices) { return _mm512_gf2p8affine_epi64_epi8(load(&nibbles_high), matrices, 0); }

// --- strings of W words, one a lane -------------------------------------------------------------------------------------------

// Shift counts beyond the lane, also negative ones, give zero.
template <int W>
STEP void put(Strings<W>& s, V bits, V at) {
    s.word[0] = _mm512_or_si512(s.word[0], _mm512_sllv_epi64(bits, at));
    for (int w = 1; w < W; ++w) {
        const V up = _mm512_sub_epi64(at, _mm512_set1_epi64(64 * w));
        s.word[w] = ternary<a_or_b_or_c>(s.word[w], _mm512_sllv_epi64(bits, up),
                                         _mm512_srlv_epi64(bits, _mm512_sub_epi64(V(), up)));
    }
}

// Look up every plane: for blocks in which few coefficients become significant. For several groups together.
template <class T, int W, int groups, int octet = 0>
STEP void put_all_planes(const Group<T>* g, const Significance (&n)[groups], Halves<T> (&at)[groups], int maxbits,
                         Strings<W> (*s)[halves<T>]) {
    int unfinished = 0;
    UNROLL for (int k = 0; k < groups; ++k) {
        const Halves<T> matrices = octet_matrices<T, octet>(g[k].d, n[k]);
        UNROLL for (int h = 0; h < halves<T>; ++h) {
            const Codes codes = eight_plane_codes(matrices.at[h]);
            V& end = at[k].at[h];
            put(s[k][h], codes.bits, end);
            end = _mm512_add_epi64(end, codes.length);
            unfinished |= _mm512_cmplt_epu64_mask(end, _mm512_set1_epi64(maxbits));
        }
    }
    if constexpr (octet + 1 < int(sizeof(T))) {
        if (unfinished) put_all_planes<T, W, groups, octet + 1>(g, n, at, maxbits, s);
    }
}

template <class T, int W, int groups>
[[gnu::noinline]] void encode_flat(const Group<T>* g, int maxbits, Strings<W> (*s)[halves<T>]) {
    Significance n[groups];
    Halves<T> at[groups];
    for (int k = 0; k < groups; ++k) {
        const Halves<T> header = zero_extend<T>(g[k].header);
        for (int h = 0; h < halves<T>; ++h) s[k][h] = {}, s[k][h].word[0] = header.at[h];
        n[k] = significance(g[k]);
        at[k] = zero_extend<T>(g[k].start);
    }
    put_all_planes<T, W, groups>(g, n, at, maxbits, s);
}

// The usual case: after eight planes three coefficients are significant, and nibbles follow, `octets` octets of them.
template <int W> constexpr int nibble_octets = W == 1 ? 1 : W == 2 ? 3 : 7;

template <class T, int W, int octet = 1>
STEP void put_nibbles(const Group<T>& g, Halves<T> at, Strings<W> (&s)[halves<T>]) {
    const Halves<T> first = nibble_matrices<T, octet>(g.d);
    V bits[halves<T>];
    for (int h = 0; h < halves<T>; ++h) bits[h] = low_nibbles(first.at[h]);
    if constexpr (octet + 1 <= nibble_octets<W>) {
        const Halves<T> second = nibble_matrices<T, octet + 1>(g.d);
        for (int h = 0; h < halves<T>; ++h) bits[h] = _mm512_or_si512(bits[h], high_nibbles(second.at[h]));
    }
    for (int h = 0; h < halves<T>; ++h) {
        put(s[h], bits[h], at.at[h]);
        at.at[h] = _mm512_add_epi64(at.at[h], _mm512_set1_epi64(64));
    }
    if constexpr (octet + 2 <= nibble_octets<W>) put_nibbles<T, W, octet + 2>(g, at, s);
}

// Compute the strings of a group; bits beyond maxbits are undefined. Return false if some lane is not the usual case. (Interleaving
// these steps by hand, as below, was slower here: it needs more registers than there are.)
template <class T, int W>
STEP bool encode_usual(const Group<T>& g, int maxbits, Strings<W> (&s)[halves<T>]) {
    constexpr bool all_planes = 8 * (1 + nibble_octets<W>) >= zfp::Format<T>::planes;
    const V enough = _mm512_set1_epi64(maxbits - 32 * nibble_octets<W>);
    const Halves<T> matrices = octet_matrices<T, 0>(g.d, significance(g));
    const Halves<T> header = zero_extend<T>(g.header), start = zero_extend<T>(g.start);
    Halves<T> at;
    int unfinished = no_bit<T>(g.coded, three_significant(g), all<T>(int64_t(zfp::sign_bit<T> >> 8)));
    for (int h = 0; h < halves<T>; ++h) {
        const Codes codes = eight_plane_codes(matrices.at[h]);
        s[h] = {}, s[h].word[0] = header.at[h];
        put(s[h], codes.bits, start.at[h]);
        at.at[h] = _mm512_add_epi64(start.at[h], codes.length);
        if (!all_planes) unfinished |= _mm512_cmplt_epi64_mask(at.at[h], enough);
    }
    put_nibbles<T, W>(g, at, s);
    return unfinished == 0;
}

// The same for at most 32 bits of floats, with one double word per block in lane order: eight planes are usually enough. For
// several groups together: each step processes all of them, which hides latencies. `end` is the end of the codes of eight planes.
template <int groups>
STEP void encode_short_usual(const Group<float> (&g)[groups], int maxbits, V (&strings)[groups], V (&end)[groups],
                             bool (&usual)[groups]) {
    Halves<float> matrices[groups];
    Codes codes[2 * groups];
    UNROLL for (int k = 0; k < groups; ++k) matrices[k] = octet_matrices<float, 0>(g[k].d, significance(g[k]));
    UNROLL for (int k = 0; k < 2 * groups; ++k) codes[k] = four_plane_codes(matrices[k / 2].at[k % 2]);
    UNROLL for (int k = 0; k < groups; ++k) {
        const Codes &a = codes[2 * k], &b = codes[2 * k + 1];
        const V middle = _mm512_add_epi32(g[k].start, narrow<0>(a.length, b.length));
        end[k] = _mm512_add_epi32(middle, narrow<1>(a.length, b.length));
        usual[k] = _mm512_mask_cmplt_epu32_mask(g[k].coded, end[k], _mm512_set1_epi32(maxbits)) == 0;
        strings[k] = ternary<a_or_b_or_c>(g[k].header, _mm512_sllv_epi32(narrow<0>(a.bits, b.bits), g[k].start),
                                          _mm512_sllv_epi32(narrow<1>(a.bits, b.bits), middle));
    }
}

}  // namespace
}  // namespace compcoll
