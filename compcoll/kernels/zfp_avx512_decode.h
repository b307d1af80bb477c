// ZFP on AVX-512, decoding: bit strings, one per lane, become a group of values in four registers.
//
// The first planes of all blocks are read in lockstep, with one table look-up per plane. Once three coefficients of every block are
// significant, nibbles follow, four bits per plane. The planes read so far are put before them as nibbles, too.
// Bit transposes then turn sixteen planes at a time into coefficients.
#pragma once

#include "zfp_avx512_lanes.h"

namespace compcoll {
namespace {

// --- the header and the empty planes ------------------------------------------------------------------------------------------

template <class T>
struct Head {
    V scale;         // 2^(exponent - bias - (planes - 3)); 0 for zero blocks, NaN if the block held a NaN or an infinity
    Mask<T> lowest;  // the lowest exponent, whose scale is subnormal: `scale` is 0 then, too
    V empty;         // number of empty planes; all planes if nothing is coded
    Mask<T> coded;   // a finite block that is not a zero block …
    Mask<T> alive;   // … and has at least one nonempty plane within its bits
};

// `front` has the header in its lowest bits, `planes` the bits after it.
template <class T>
STEP Head<T> read_head(V front, V planes) {
    using F = zfp::Format<T>;
    const V one = all<T>(1), field_mask = all<T>(int64_t(zfp::exponent_mask<T>) << F::mantissa_bits);
    const V field = _mm512_and_si512(left<T>(front, F::mantissa_bits - 1), field_mask);
    const Mask<T> something = any_bit<T>(front, one);
    const Mask<T> nan = no_bit<T>(something, front, all<T>(2 * zfp::exponent_mask<T>));
    const V lowest = all<T>(int64_t(F::lowest_exponent + 1) << F::mantissa_bits);
    // trailing zeros; the number of bits if there are no others
    const V zeros = all<T>(F::planes), ones_below = _mm512_andnot_si512(planes, sub<T>(planes, one));
    Head<T> head;
    const Mask<T> coded = head.coded = not_below<T>(something, field, lowest);
    head.scale = only<T>(coded, sub<T>(field, lowest));
    head.lowest = equal<T>(field, lowest) & something;
    head.scale = choose<T>(nan, head.scale, all<T>(int64_t(quiet_nan_bits<T>)));
    head.empty = choose<T>(coded, zeros, sub<T>(zeros, leading_zeros<T>(ones_below)));
    head.alive = below<T>(head.empty, zeros);
    return head;
}

// --- planes in lockstep -------------------------------------------------------------------------------------------------------

// A table's result for each lane: the plane's bits; `step` has the code's length (5 bits) and the region of the next index.
struct LanePlane {
    V bits, step;
};

template <class T>
constexpr __mmask64 lowest_byte = sizeof(T) == 4 ? 0x1111111111111111 : 0x0101010101010101;

template <class T>
STEP LanePlane first_plane(V next_bits) {
    const V index = next_bits;  // vpermb uses six bits
    return {_mm512_maskz_permutexvar_epi8(lowest_byte<T>, index, load(&first_bits)),
            _mm512_maskz_permutexvar_epi8(lowest_byte<T>, index, load(&first_step))};
}

// Region 64, 32 or 0 keeps 6, 5 or 5 bits of the stream beside it.
template <class T>
STEP LanePlane next_plane(V next_bits, V step) {
    const V kept = ternary<a_and_b_or_c>(next_bits, right<T>(step, 1), all<T>(31));
    const V index = ternary<a_or_b_and_c>(kept, step, all<T>(region_mask));
    return {_mm512_maskz_permutex2var_epi8(lowest_byte<T>, load(&low_bits), index, load(&high_bits)),
            _mm512_maskz_permutex2var_epi8(lowest_byte<T>, load(&low_step), index, load(&high_step))};
}

constexpr int lockstep_planes = 5;

template <class T>
struct FirstPlanes {
    V nibbles;       // of lockstep_planes planes
    V length;        // of their codes
    Mask<T> usual;   // three coefficients are significant, and became so before the bits ran out
};

// Read at most 22 bits from `start`, in lanes of at least 32 bits, for several groups together.
template <class T, int groups>
STEP void read_first_planes(V (&next_bits)[groups], const V (&start)[groups], int maxbits, FirstPlanes<T> (&first)[groups]) {
    const V regions = all<T>(region_mask), lengths = all<T>(31);
    LanePlane plane[groups];
    UNROLL for (int g = 0; g < groups; ++g) {
        plane[g] = first_plane<T>(next_bits[g]);
        first[g] = {plane[g].bits, plane[g].step, 0};
    }
    V end[groups];
    Mask<T> whole[groups];
    UNROLL for (int p = 1; p < lockstep_planes; ++p) {
        // vprorvd uses the low five bits of the step: the length
        UNROLL for (int g = 0; g < groups; ++g) next_bits[g] = _mm512_rorv_epi32(next_bits[g], plane[g].step);
        UNROLL for (int g = 0; g < groups; ++g) plane[g] = next_plane<T>(next_bits[g], plane[g].step);
        UNROLL for (int g = 0; g < groups; ++g) {
            first[g].nibbles = _mm512_or_si512(first[g].nibbles, left<T>(plane[g].bits, 4 * p));
            first[g].length = add<T>(first[g].length, plane[g].step);
        }
        if (p != 2) continue;  // from here on, bits may run out once three are significant: zeros follow, as nibbles need
        UNROLL for (int g = 0; g < groups; ++g) {
            end[g] = sub<T>(all<T>(maxbits), start[g]);
            whole[g] = up_to<T>(_mm512_and_si512(first[g].length, lengths), end[g]);
            first[g].usual = no_bit<T>(whole[g], plane[g].step, regions);
        }
    }
    UNROLL for (int g = 0; g < groups; ++g) {
        first[g].length = _mm512_and_si512(first[g].length, lengths);  // removes the regions above
        first[g].usual |= no_bit<T>(whole[g] & up_to<T>(first[g].length, end[g]), plane[g].step, regions);
    }
}

// --- from nibbles to coefficients ---------------------------------------------------------------------------------------------

// Transpose sixteen planes of each block. The result's bytes: d0 d1 d2 d3 of the first eight planes, then d0 d1 d2 d3 of the rest.
STEP V octets_of(V nibbles) {
    const V first = _mm512_multishift_epi64_epi8(load(&eight_nibbles_low), nibbles);
    const V second = _mm512_multishift_epi64_epi8(load(&eight_nibbles_high), nibbles);
    return _mm512_or_si512(_mm512_gf2p8affine_epi64_epi8(load(&bits_up_low), first, 0),
                           _mm512_gf2p8affine_epi64_epi8(load(&bits_up_high), second, 0));
}

// The source of byte b in a lane of coefficient i, in the octets of one word of nibbles (for floats, in two registers).
template <class T>
constexpr Bytes<64> octet_source(int coefficient) {
    const int size = sizeof(T);
    return bytes([=](int i) {
        const int lane = i / size, octet = 1 - i % 2;
        const int quadword = size == 4 ? lane / 4 * 2 + lane % 2 + lane / 2 % 2 * 8 : lane;
        return 8 * quadword + 4 * octet + coefficient;
    });
}

template <class T, int word>
constexpr __mmask64 octet_place() {  // the two bytes of each lane that word `word` fills; word 0 is the highest
    __mmask64 mask = 0;
    for (int i = 0; i < 64; ++i)
        if (i % int(sizeof(T)) / 2 == int(sizeof(T)) / 2 - 1 - word) mask |= __mmask64(1) << i;
    return mask;
}

template <class T, int word, int coefficient>
STEP V place_octets(const Halves<T>& octets) {
    static constexpr Bytes<64> source = octet_source<T>(coefficient);
    if constexpr (single<T>)
        return _mm512_maskz_permutex2var_epi8(octet_place<T, word>(), octets.at[0], load(&source), octets.at[1]);
    else
        return _mm512_maskz_permutexvar_epi8(octet_place<T, word>(), load(&source), octets.at[0]);
}

template <class T, int word>
STEP void place_word(const Halves<T>& octets, V (&d)[4]) {
    const V placed[4] = {place_octets<T, word, 0>(octets), place_octets<T, word, 1>(octets),
                         place_octets<T, word, 2>(octets), place_octets<T, word, 3>(octets)};
    UNROLL for (int i = 0; i < 4; ++i) d[i] = word == 0 ? placed[i] : _mm512_or_si512(d[i], placed[i]);
}

template <class T, int N, int word = 0>
STEP void place_planes(const Strings<N> (&nibbles)[halves<T>], V (&d)[4]) {
    Halves<T> octets;
    UNROLL for (int h = 0; h < halves<T>; ++h) octets.at[h] = octets_of(nibbles[h].word[word]);
    place_word<T, word>(octets, d);
    if constexpr (word + 1 < N && 16 * (word + 1) < zfp::Format<T>::planes) place_planes<T, N, word + 1>(nibbles, d);
}

// Eight planes of floats, one double word per block.
STEP void place_short_planes(V nibbles, V (&d)[4]) {
    const auto octet = [](V a) {
        return _mm512_gf2p8affine_epi64_epi8(load(&bits_up_low), _mm512_multishift_epi64_epi8(load(&eight_nibbles_low), a), 0);
    };
    const V octets = narrow<0>(octet(_mm512_unpacklo_epi32(nibbles, nibbles)), octet(_mm512_unpackhi_epi32(nibbles, nibbles)));
    UNROLL for (int i = 0; i < 4; ++i) d[i] = left<float>(octets, 24 - 8 * i);  // i = 3 in the top byte of a lane …
    const V top = all<float>(int64_t(0xff000000));
    UNROLL for (int i = 0; i < 4; ++i) d[i] = _mm512_and_si512(d[i], top);
}

// --- from coefficients to values ----------------------------------------------------------------------------------------------

template <class T>
STEP void recorrelate(V (&d)[4]) {
    const V mask = all<T>(int64_t(zfp::negabinary_mask<T>));
    V c[4];
    UNROLL for (int i = 0; i < 4; ++i) c[i] = sub<T>(_mm512_xor_si512(d[i], mask), mask);
    V x = c[0], y = c[1], z = c[2], w = c[3];
    y = add<T>(y, half<T>(w)), w = sub<T>(w, half<T>(y));
    d[1] = add<T>(y, w), d[3] = sub<T>(w, y), y = d[1], w = d[3];
    d[2] = add<T>(z, x), d[0] = sub<T>(x, z), z = d[2], x = d[0];
    d[1] = add<T>(y, z), d[2] = sub<T>(z, y);
    d[3] = add<T>(w, x), d[0] = sub<T>(x, w);
}

template <class T>
STEP V product(V a, V b) {
    if constexpr (single<T>) return _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
    else return _mm512_castpd_si512(_mm512_mul_pd(_mm512_castsi512_pd(a), _mm512_castsi512_pd(b)));
}

// The conversion rounds; the product with a power of two is exact, or an infinity.
template <class T>
STEP V to_floating(V fixed, V scale) {
    if constexpr (single<T>) return product<T>(_mm512_castps_si512(_mm512_cvtepi32_ps(fixed)), scale);
    else return product<T>(_mm512_castpd_si512(_mm512_cvtepi64_pd(fixed)), scale);
}

// For a subnormal scale: multiply in two steps. ±1 then gives a subnormal result, written as bits for processors that flush these.
template <class T>
STEP void on_lowest_exponent(Mask<T> lowest, V fixed, V& x) {
    using F = zfp::Format<T>;
    const auto power = [](int64_t field) { return all<T>(field << F::mantissa_bits); };
    const V unit = to_floating<T>(fixed, power(zfp::exponent_mask<T> / 2 - (F::planes - 3)));
    x = choose<T>(lowest, x, product<T>(unit, power(F::lowest_exponent)));
    const V smallest = all<T>(int64_t(1) << (F::mantissa_bits - 1));
    x = choose<T>(lowest & equal<T>(fixed, all<T>(1)), x, smallest);
    x = choose<T>(lowest & equal<T>(fixed, all<T>(-1)), x, _mm512_or_si512(smallest, all<T>(int64_t(zfp::sign_bit<T>))));
}

template <class T, bool accumulate>
STEP void write_values(const V (&x)[4], const T* base, T* values) {
    for (int k = 0; k < 4; ++k) {
        const T* from = base + k * group_blocks<T>;
        T* at = values + k * group_blocks<T>;
        if constexpr (!accumulate) store(at, x[k]);
        else if constexpr (single<T>) _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(from), _mm512_castsi512_ps(x[k])));
        else _mm512_storeu_pd(at, _mm512_add_pd(_mm512_loadu_pd(from), _mm512_castsi512_pd(x[k])));
    }
}

template <class T, bool accumulate>
STEP void to_values(const V (&d)[4], const Head<T>& head, const T* base, T* values) {
    V c[4], x[4];
    UNROLL for (int i = 0; i < 4; ++i) c[i] = to_floating<T>(d[i], head.scale);
    if (head.lowest) [[unlikely]]
        for (int i = 0; i < 4; ++i) on_lowest_exponent<T>(head.lowest, d[i], c[i]);
    transpose_back<T>(c, x);
    write_values<T, accumulate>(x, base, values);
}

// --- groups -------------------------------------------------------------------------------------------------------------------

template <class T>
struct Decoded {
    V d[4];
    Head<T> head;
};

template <class T>
STEP void finish_planes(Decoded<T>& group) {
    UNROLL for (int i = 0; i < 4; ++i) group.d[i] = right<T>(group.d[i], group.head.empty);
    recorrelate<T>(group.d);
}

// Return the bits of each string from bit `at` on; 0 ≤ at ≤ 64.
template <int W>
STEP V take(const Strings<W>& s, int word, V at) {
    const V low = _mm512_srlv_epi64(s.word[word], at);
    if (word + 1 >= W) return low;
    return _mm512_or_si512(low, _mm512_sllv_epi64(s.word[word + 1], _mm512_sub_epi64(_mm512_set1_epi64(64), at)));
}

template <class T>
STEP V join(const Halves<T>& a) {  // the low parts, as lanes
    if constexpr (single<T>) return narrow<0>(a.at[0], a.at[1]);
    else return a.at[0];
}

template <class T, int W>
STEP Halves<T> take_halves(const Strings<W> (&s)[halves<T>], const Halves<T>& at, int word = 0) {
    Halves<T> taken;
    UNROLL for (int h = 0; h < halves<T>; ++h) taken.at[h] = take(s[h], word, at.at[h]);
    return taken;
}

template <class T, int W>
STEP Head<T> read_head_of(const Strings<W> (&s)[halves<T>]) {
    Halves<T> front, after;
    UNROLL for (int h = 0; h < halves<T>; ++h) front.at[h] = s[h].word[0], after.at[h] = _mm512_set1_epi64(zfp::header_bits<T>);
    return read_head<T>(join<T>(front), join<T>(take_halves<T>(s, after)));
}

// The usual case, for several groups together: each step processes all of them, which hides latencies. usual[g] is false if bits
// remain in some lane and fewer than three coefficients are significant.
template <class T, int W, int groups>
STEP void decode_usual(const Strings<W> (&s)[groups][halves<T>], int maxbits, Decoded<T> (&group)[groups], bool (&usual)[groups]) {
    V start[groups], next_bits[groups];
    FirstPlanes<T> first[groups];
    UNROLL for (int g = 0; g < groups; ++g) {
        group[g].head = read_head_of<T, W>(s[g]);
        start[g] = add<T>(group[g].head.empty, all<T>(zfp::header_bits<T> + 1));
        next_bits[g] = join<T>(take_halves<T>(s[g], zero_extend<T>(start[g])));
    }
    read_first_planes<T>(next_bits, start, maxbits < 64 ? maxbits : 64, first);
    const V first_nibbles = _mm512_set1_epi64((1 << 4 * lockstep_planes) - 1);
    UNROLL for (int g = 0; g < groups; ++g) {
        usual[g] = (group[g].head.alive & Mask<T>(~first[g].usual)) == 0;
        const V rest = sub<T>(add<T>(start[g], first[g].length), all<T>(4 * lockstep_planes));
        const Halves<T> at = zero_extend<T>(rest), head = zero_extend<T>(first[g].nibbles);
        Strings<W> nibbles[halves<T>];
        UNROLL for (int h = 0; h < halves<T>; ++h) {
            UNROLL for (int w = 0; w < W; ++w) nibbles[h].word[w] = take(s[g][h], w, at.at[h]);
            nibbles[h].word[0] = ternary<b_if_c_else_a>(nibbles[h].word[0], head.at[h], first_nibbles);
        }
        place_planes<T>(nibbles, group[g].d);
    }
    UNROLL for (int g = 0; g < groups; ++g) finish_planes(group[g]);
}

// The same for at most 32 bits of floats, one double word per block.
template <int groups>
STEP void decode_short_usual(const V (&s)[groups], int maxbits, Decoded<float> (&group)[groups], bool (&usual)[groups]) {
    using T = float;
    V start[groups], next_bits[groups];
    FirstPlanes<T> first[groups];
    UNROLL for (int g = 0; g < groups; ++g) {
        group[g].head = read_head<T>(s[g], right<T>(s[g], zfp::header_bits<T>));
        start[g] = add<T>(group[g].head.empty, all<T>(zfp::header_bits<T> + 1));
        next_bits[g] = right<T>(s[g], start[g]);
    }
    read_first_planes<T>(next_bits, start, maxbits, first);
    const V first_nibbles = all<T>((1 << 4 * lockstep_planes) - 1);
    UNROLL for (int g = 0; g < groups; ++g) {
        usual[g] = (group[g].head.alive & Mask<T>(~first[g].usual)) == 0;
        const V rest = right<T>(s[g], sub<T>(add<T>(start[g], first[g].length), all<T>(4 * lockstep_planes)));
        place_short_planes(ternary<b_if_c_else_a>(rest, first[g].nibbles, first_nibbles), group[g].d);
    }
    UNROLL for (int g = 0; g < groups; ++g) finish_planes(group[g]);
}

}  // namespace
}  // namespace compcoll
