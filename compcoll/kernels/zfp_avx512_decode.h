// ZFP on AVX-512, decoding: bit strings, one a lane, become a group of values in four registers.
//
// The first planes of all blocks are read in lockstep, one table look-up a plane. As soon as three coefficients of every block are
// significant, what follows are nibbles, four bits a plane, and the planes read so far are put before them as nibbles too:
// bit transposes then turn sixteen planes at a time into coefficients.
#pragma once

#include "zfp_avx512_lanes.h"

namespace compcoll {
namespace {

// --- the header and the empty planes ------------------------------------------------------------------------------------------

template <class T>
struct Head {
    V scale;        // 2^(exponent - bias); 0 for zero blocks, NaN where the block held a NaN or an infinity
    V empty;        // how many planes are empty; all of them if nothing is coded
    Mask<T> alive;  // something is coded
};

// `front` has the header in its lowest bits, `planes` what follows it.
template <class T>
Head<T> read_head(V front, V planes) {
    using F = zfp::Format<T>;
    const V one = all<T>(1), field_mask = all<T>(int64_t(zfp::exponent_mask<T>) << F::mantissa_bits);
    const V field = _mm512_and_si512(left<T>(front, F::mantissa_bits - 1), field_mask);
    const Mask<T> something = any_bit<T>(front, one);
    const Mask<T> nan = no_bit<T>(something, front, all<T>(2 * zfp::exponent_mask<T>));
    const V lowest = all<T>((int64_t(F::lowest_exponent) + 1) << F::mantissa_bits);
    const Mask<T> coded = not_below<T>(something, field, lowest);
    // trailing zeros; as many as there are bits if there is no other
    const V zeros = all<T>(F::planes), ones_below = _mm512_andnot_si512(planes, sub<T>(planes, one));
    Head<T> head;
    head.scale = only<T>(coded, sub<T>(field, all<T>(int64_t(1) << F::mantissa_bits)));
    head.scale = choose<T>(nan, head.scale, all<T>(int64_t(zfp::quiet_nan<T>)));
    head.empty = choose<T>(coded, zeros, sub<T>(zeros, leading_zeros<T>(ones_below)));
    head.alive = below<T>(head.empty, zeros);
    return head;
}

// --- planes in lockstep -------------------------------------------------------------------------------------------------------

// A table's answer for each lane: the plane's bits, and in `step` the code's length (5 bits) and the next index's region.
struct LanePlane {
    V bits, step;
};

template <class T>
constexpr __mmask64 lowest_byte = sizeof(T) == 4 ? 0x1111111111111111 : 0x0101010101010101;

template <class T>
LanePlane first_plane(V next_bits) {
    const V index = next_bits;  // vpermb looks at six bits
    return {_mm512_maskz_permutexvar_epi8(lowest_byte<T>, index, load(&first_bits)),
            _mm512_maskz_permutexvar_epi8(lowest_byte<T>, index, load(&first_step))};
}

// Region 64, 32 or 0 keeps 6, 5, 5 bits of the stream beside it.
template <class T>
LanePlane next_plane(V next_bits, V step) {
    const V kept = ternary<a_and_b_or_c>(next_bits, right<T>(step, 1), all<T>(31));
    const V index = ternary<a_or_b_and_c>(kept, step, all<T>(region_mask));
    return {_mm512_maskz_permutex2var_epi8(lowest_byte<T>, load(&low_bits), index, load(&high_bits)),
            _mm512_maskz_permutex2var_epi8(lowest_byte<T>, load(&low_step), index, load(&high_step))};
}

constexpr int lockstep_planes = 5;

template <class T>
struct FirstPlanes {
    V nibbles;            // of lockstep_planes planes
    V length;             // of their codes
    Mask<T> few;          // fewer than three coefficients are significant
};

// Reads at most 22 bits, of lanes that have 32 at least.
template <class T>
FirstPlanes<T> read_first_planes(V next_bits) {
    LanePlane plane = first_plane<T>(next_bits);
    FirstPlanes<T> first{plane.bits, plane.step, 0};
    for (int p = 1; p < lockstep_planes; ++p) {
        next_bits = _mm512_rorv_epi32(next_bits, plane.step);  // by five bits: the length
        plane = next_plane<T>(next_bits, plane.step);
        first.nibbles = _mm512_or_si512(first.nibbles, left<T>(plane.bits, 4 * p));
        first.length = add<T>(first.length, plane.step);
    }
    first.length = _mm512_and_si512(first.length, all<T>(31));  // regions lie above
    first.few = any_bit<T>(plane.step, all<T>(region_mask));
    return first;
}

// --- from nibbles to coefficients ---------------------------------------------------------------------------------------------

// Sixteen planes of each block; the result's bytes: d0 d1 d2 d3 of the first eight, then d0 d1 d2 d3 of the others.
inline V octets_of(V nibbles) {
    const V first = _mm512_multishift_epi64_epi8(load(&eight_nibbles_low), nibbles);
    const V second = _mm512_multishift_epi64_epi8(load(&eight_nibbles_high), nibbles);
    return _mm512_or_si512(_mm512_gf2p8affine_epi64_epi8(load(&bits_up_low), first, 0),
                           _mm512_gf2p8affine_epi64_epi8(load(&bits_up_high), second, 0));
}

// Where byte b of a lane of coefficient i comes from, in the octets of one word of nibbles, two registers of them for floats.
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
constexpr __mmask64 octet_place() {  // the two bytes of each lane, from the top, that word `word` fills
    __mmask64 mask = 0;
    for (int i = 0; i < 64; ++i)
        if (i % int(sizeof(T)) / 2 == int(sizeof(T)) / 2 - 1 - word) mask |= __mmask64(1) << i;
    return mask;
}

template <class T, int word, int coefficient>
V place_octets(const Halves<T>& octets) {
    static constexpr Bytes<64> source = octet_source<T>(coefficient);
    if constexpr (single<T>)
        return _mm512_maskz_permutex2var_epi8(octet_place<T, word>(), octets.at[0], load(&source), octets.at[1]);
    else
        return _mm512_maskz_permutexvar_epi8(octet_place<T, word>(), load(&source), octets.at[0]);
}

template <class T, int N, int word = 0>
void place_planes(const Strings<N> (&nibbles)[halves<T>], V (&d)[4]) {
    Halves<T> octets;
    for (int h = 0; h < halves<T>; ++h) octets.at[h] = octets_of(nibbles[h].word[word]);
    const V placed[4] = {place_octets<T, word, 0>(octets), place_octets<T, word, 1>(octets),
                         place_octets<T, word, 2>(octets), place_octets<T, word, 3>(octets)};
    for (int i = 0; i < 4; ++i) d[i] = word == 0 ? placed[i] : _mm512_or_si512(d[i], placed[i]);
    if constexpr (word + 1 < N && 16 * (word + 1) < zfp::Format<T>::planes) place_planes<T, N, word + 1>(nibbles, d);
}

// Eight planes of floats, a double word a block.
inline void place_short_planes(V nibbles, V (&d)[4]) {
    const auto octet = [](V a) {
        return _mm512_gf2p8affine_epi64_epi8(load(&bits_up_low), _mm512_multishift_epi64_epi8(load(&eight_nibbles_low), a), 0);
    };
    const V octets = narrow<0>(octet(_mm512_unpacklo_epi32(nibbles, nibbles)), octet(_mm512_unpackhi_epi32(nibbles, nibbles)));
    for (int i = 0; i < 4; ++i) d[i] = left<float>(octets, 24 - 8 * i);  // i = 3 in the top byte of a lane …
    const V top = all<float>(int64_t(0xff000000));
    for (int i = 0; i < 4; ++i) d[i] = _mm512_and_si512(d[i], top);
}

// --- from coefficients to values ----------------------------------------------------------------------------------------------

template <class T>
void recorrelate(V (&d)[4]) {
    const V mask = all<T>(int64_t(zfp::negabinary_mask<T>));
    V c[4];
    for (int i = 0; i < 4; ++i) c[i] = sub<T>(_mm512_xor_si512(d[i], mask), mask);
    V x = c[0], y = c[1], z = c[2], w = c[3];
    y = add<T>(y, half<T>(w)), w = sub<T>(w, half<T>(y));
    d[1] = add<T>(y, w), d[3] = sub<T>(w, y), y = d[1], w = d[3];
    d[2] = add<T>(z, x), d[0] = sub<T>(x, z), z = d[2], x = d[0];
    d[1] = add<T>(y, z), d[2] = sub<T>(z, y);
    d[3] = add<T>(w, x), d[0] = sub<T>(x, w);
}

// i · 2^(exponent - bias - (planes - 3)): the conversion rounds, the products with powers of two are exact, or overflow to an infinity.
template <class T>
V to_floating(V fixed, V scale) {
    if constexpr (single<T>) {
        const __m512 unit = _mm512_mul_ps(_mm512_cvtepi32_ps(fixed), _mm512_set1_ps(0x1p-29f));
        return _mm512_castps_si512(_mm512_mul_ps(unit, _mm512_castsi512_ps(scale)));
    } else {
        const __m512d unit = _mm512_mul_pd(_mm512_cvtepi64_pd(fixed), _mm512_set1_pd(0x1p-61));
        return _mm512_castpd_si512(_mm512_mul_pd(unit, _mm512_castsi512_pd(scale)));
    }
}

template <class T, bool accumulate>
void write_values(const V (&x)[4], T* values) {
    for (int k = 0; k < 4; ++k) {
        T* at = values + k * group_blocks<T>;
        if constexpr (!accumulate) store(at, x[k]);
        else if constexpr (single<T>) _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), _mm512_castsi512_ps(x[k])));
        else _mm512_storeu_pd(at, _mm512_add_pd(_mm512_loadu_pd(at), _mm512_castsi512_pd(x[k])));
    }
}

template <class T, bool accumulate>
void to_values(const V (&d)[4], V scale, T* values) {
    V c[4], x[4];
    for (int i = 0; i < 4; ++i) c[i] = to_floating<T>(d[i], scale);
    transpose_back<T>(c, x);
    write_values<T, accumulate>(x, values);
}

// --- groups -------------------------------------------------------------------------------------------------------------------

template <class T>
struct Decoded {
    V d[4];
    Head<T> head;
};

template <class T>
void finish_planes(Decoded<T>& group) {
    for (int i = 0; i < 4; ++i) group.d[i] = right<T>(group.d[i], group.head.empty);
    recorrelate<T>(group.d);
}

// Bits `at` … of strings, 0 ≤ at ≤ 64.
template <int W>
V take(const Strings<W>& s, int word, V at) {
    const V low = _mm512_srlv_epi64(s.word[word], at);
    if (word + 1 >= W) return low;
    return _mm512_or_si512(low, _mm512_sllv_epi64(s.word[word + 1], _mm512_sub_epi64(_mm512_set1_epi64(64), at)));
}

template <class T>
V join(const Halves<T>& a) {  // to lanes, of the low parts
    if constexpr (single<T>) return narrow<0>(a.at[0], a.at[1]);
    else return a.at[0];
}

template <class T, int W>
Halves<T> take_halves(const Strings<W> (&s)[halves<T>], const Halves<T>& at, int word = 0) {
    Halves<T> taken;
    for (int h = 0; h < halves<T>; ++h) taken.at[h] = take(s[h], word, at.at[h]);
    return taken;
}

template <class T, int W>
Head<T> read_head_of(const Strings<W> (&s)[halves<T>]) {
    Halves<T> front, after;
    for (int h = 0; h < halves<T>; ++h) front.at[h] = s[h].word[0], after.at[h] = _mm512_set1_epi64(zfp::header_bits<T>);
    return read_head<T>(join<T>(front), join<T>(take_halves<T>(s, after)));
}

// Plane by plane to the end, whatever the bits are: for blocks in which few coefficients are significant.
// Where the bits run out in the search for a one, libzfp finds it there: as if a one followed.
template <int W>
struct FlatReader {
    Strings<W> s;
    V left;  // bits before the end

    void skip(V count) {
        for (int w = 0; w < W; ++w) s.word[w] = take(s, w, count);
        left = _mm512_sub_epi64(left, count);
    }

    bool at_end() const {
        V any = s.word[0];
        for (int w = 1; w < W; ++w) any = _mm512_or_si512(any, s.word[w]);
        return _mm512_test_epi64_mask(any, any) == 0;
    }

    template <class Read>
    V read(V& step, Read look_up) {
        LanePlane plane = look_up(s.word[0]);
        const V length = _mm512_and_si512(plane.step, _mm512_set1_epi64(31));
        // running over the end into the last coefficient
        const __mmask8 last = _mm512_test_epi64_mask(plane.bits, _mm512_set1_epi64(8));
        const __mmask8 over = _mm512_mask_cmpgt_epi64_mask(last, length, left);
        if (over) {
            const V one_at_end = _mm512_sllv_epi64(_mm512_set1_epi64(1), left);
            const LanePlane found = look_up(_mm512_or_si512(s.word[0], one_at_end));
            plane.bits = _mm512_mask_mov_epi64(plane.bits, over, found.bits);
        }
        step = plane.step;
        skip(length);
        return plane.bits;
    }
};

template <class T> constexpr int all_words = zfp::Format<T>::planes / 16;  // of nibbles

template <int W, int N>
void read_flat(FlatReader<W> reader, int planes, Strings<N>& nibbles) {
    nibbles = {};
    V step;
    nibbles.word[0] = reader.read(step, [](V bits) { return first_plane<double>(bits); });
    for (int p = 1; p < planes && !reader.at_end(); ++p) {
        const V bits = reader.read(step, [step](V next) { return next_plane<double>(next, step); });
        V& word = nibbles.word[p / 16];
        word = _mm512_or_si512(word, _mm512_sll_epi64(bits, _mm_cvtsi32_si128(p % 16 * 4)));
    }
}

template <class T, int W>
[[gnu::noinline]] void decode_flat(const Strings<W> (&s)[halves<T>], int maxbits, Decoded<T>& group) {
    group.head = read_head_of<T, W>(s);
    const Halves<T> empty = zero_extend<T>(group.head.empty);
    Strings<all_words<T>> nibbles[halves<T>];
    for (int h = 0; h < halves<T>; ++h) {
        FlatReader<W> reader{s[h], _mm512_set1_epi64(maxbits)};
        reader.skip(_mm512_set1_epi64(zfp::header_bits<T>));
        reader.skip(empty.at[h]);
        reader.skip(_mm512_set1_epi64(1));
        read_flat(reader, zfp::Format<T>::planes, nibbles[h]);
    }
    place_planes<T>(nibbles, group.d);
    finish_planes(group);
}

// The usual case. False where a lane is not: where bits remain and fewer than three coefficients are significant.
template <class T, int W>
bool decode_usual(const Strings<W> (&s)[halves<T>], int maxbits, Decoded<T>& group) {
    group.head = read_head_of<T, W>(s);
    const V start = add<T>(group.head.empty, all<T>(zfp::header_bits<T> + 1));
    const V next_bits = join<T>(take_halves<T>(s, zero_extend<T>(start)));
    const FirstPlanes<T> first = read_first_planes<T>(next_bits);
    const V end = add<T>(start, first.length);
    const int last_end = maxbits < 64 ? maxbits : 64;  // a shift below takes no more
    const Mask<T> unusual = group.head.alive & (first.few | below<T>(all<T>(last_end), end));

    const Halves<T> rest = zero_extend<T>(sub<T>(end, all<T>(4 * lockstep_planes))), head = zero_extend<T>(first.nibbles);
    Strings<W> nibbles[halves<T>];
    for (int w = 0; w < W; ++w) {
        const Halves<T> taken = take_halves<T>(s, rest, w);
        for (int h = 0; h < halves<T>; ++h) nibbles[h].word[w] = taken.at[h];
    }
    for (int h = 0; h < halves<T>; ++h)
        nibbles[h].word[0] = ternary<b_if_c_else_a>(nibbles[h].word[0], head.at[h], _mm512_set1_epi64((1 << 4 * lockstep_planes) - 1));
    place_planes<T>(nibbles, group.d);
    finish_planes(group);
    return unusual == 0;
}

// The same for at most 32 bits of floats, a double word a block.
inline bool decode_short_usual(V s, int maxbits, Decoded<float>& group) {
    using T = float;
    group.head = read_head<T>(s, right<T>(s, zfp::header_bits<T>));
    const V start = add<T>(group.head.empty, all<T>(zfp::header_bits<T> + 1));
    const FirstPlanes<T> first = read_first_planes<T>(right<T>(s, start));
    const V end = add<T>(start, first.length);
    const Mask<T> unusual = group.head.alive & (first.few | below<T>(all<T>(maxbits), end));
    const V rest = right<T>(s, sub<T>(end, all<T>(4 * lockstep_planes)));
    place_short_planes(ternary<b_if_c_else_a>(rest, first.nibbles, all<T>((1 << 4 * lockstep_planes) - 1)), group.d);
    finish_planes(group);
    return unusual == 0;
}

}  // namespace
}  // namespace compcoll
