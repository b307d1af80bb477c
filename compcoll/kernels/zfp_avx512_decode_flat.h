// ZFP on AVX-512, decoding blocks with few significant coefficients: smooth data, in which every plane has a code.
#pragma once

#include "zfp_avx512_decode.h"

namespace compcoll {
namespace {

// Reads plane by plane to the end, whatever the bits are: for blocks with few significant coefficients.
template <class T, int W>
struct PlaneReader {
    Strings<W> s;
    V left;  // upper bound of the bits before the end
    LanePlane plane;

    void skip(V count) {
        UNROLL for (int w = 0; w < W; ++w) s.word[w] = single<T> ? right<T>(s.word[w], count) : take(s, w, count);
        left = sub<T>(left, count);
    }

    // If the bits run out in the search for a one bit, libzfp finds it there, as if a one bit followed.
    template <class LookUp>
    void read(LookUp look_up) {
        const LanePlane found = look_up(s.word[0]);
        const V length = _mm512_and_si512(found.step, all<T>(31));
        const Mask<T> over = greater<T>(any_bit<T>(found.bits, all<T>(8)), length, left);  // searched up to the last coefficient
        plane = found;
        if (over) [[unlikely]] {
            const V one_at_end = left_by<T>(all<T>(1), left);
            plane.bits = choose<T>(over, found.bits, look_up(_mm512_or_si512(s.word[0], one_at_end)).bits);
        }
        skip(length);
    }

    void read_first() { read([](V bits) { return first_plane<T>(bits); }); }
    void read_next() { read([step = plane.step](V bits) { return next_plane<T>(bits, step); }); }
};

// Run several readers together, for at most `planes` planes; nibbles[r][i] holds as many planes as a lane has nibbles.
template <class T, int W, int readers, int N>
STEP void read_flat(PlaneReader<T, W> (&reader)[readers], int planes, V (&nibbles)[readers][N]) {
    constexpr int per_lane = 2 * sizeof(T);
    UNROLL for (int r = 0; r < readers; ++r) reader[r].read_first();
    UNROLL for (int i = 0; i < N; ++i)
        UNROLL for (int r = 0; r < readers; ++r) nibbles[r][i] = i == 0 ? reader[r].plane.bits : V();
    for (int p = 1; p < planes; ++p) {
        const __m128i place = _mm_cvtsi32_si128(p % per_lane * 4);
        V any{};  // the rest of all strings: if it is zero, only planes of zeros follow
        UNROLL for (int r = 0; r < readers; ++r)
            UNROLL for (int w = 0; w < W; ++w) any = _mm512_or_si512(any, reader[r].s.word[w]);
        if (_mm512_test_epi64_mask(any, any) == 0) return;
        UNROLL for (int r = 0; r < readers; ++r) {
            reader[r].read_next();
            V& word = nibbles[r][p / per_lane];
            const V bits = reader[r].plane.bits;
            word = _mm512_or_si512(word, single<T> ? _mm512_sll_epi32(bits, place) : _mm512_sll_epi64(bits, place));
        }
    }
}

// The most planes after the first one bit within maxbits ≤ 64·W bits: each takes at least two bits.
template <class T, int W>
constexpr int most_planes = 32 * W - 4 < zfp::Format<T>::planes ? 32 * W - 4 : zfp::Format<T>::planes;

template <class T, int W, int groups>
[[gnu::noinline]] void decode_flat(const Strings<W> (*s)[halves<T>], int maxbits, Decoded<T>* group) {
    constexpr int readers = groups * halves<T>, words = (most_planes<T, W> + 15) / 16;
    PlaneReader<double, W> reader[readers];
    UNROLL for (int g = 0; g < groups; ++g) {
        group[g].head = read_head_of<T, W>(s[g]);
        const Halves<T> empty = zero_extend<T>(group[g].head.empty);
        UNROLL for (int h = 0; h < halves<T>; ++h) {
            auto& r = reader[g * halves<T> + h];
            r.s = s[g][h], r.left = _mm512_set1_epi64(maxbits);
            r.skip(_mm512_set1_epi64(zfp::header_bits<T>)), r.skip(empty.at[h]), r.skip(_mm512_set1_epi64(1));
        }
    }
    V nibbles[readers][words];
    read_flat(reader, most_planes<T, W>, nibbles);
    UNROLL for (int g = 0; g < groups; ++g) {
        Strings<words> group_nibbles[halves<T>];
        UNROLL for (int h = 0; h < halves<T>; ++h)
            UNROLL for (int w = 0; w < words; ++w) group_nibbles[h].word[w] = nibbles[g * halves<T> + h][w];
        place_planes<T>(group_nibbles, group[g].d);
        finish_planes(group[g]);
    }
}

template <int groups>
[[gnu::noinline]] void decode_short_flat(const V* s, int maxbits, Decoded<float>* group) {
    using T = float;
    PlaneReader<T, 1> reader[groups];
    UNROLL for (int g = 0; g < groups; ++g) {
        group[g].head = read_head<T>(s[g], right<T>(s[g], zfp::header_bits<T>));
        reader[g].s.word[0] = s[g], reader[g].left = all<T>(maxbits);
        reader[g].skip(add<T>(group[g].head.empty, all<T>(zfp::header_bits<T> + 1)));
    }
    V nibbles[groups][2];  // 16 planes: more than 22 bits can hold
    read_flat(reader, 16, nibbles);
    UNROLL for (int g = 0; g < groups; ++g) {
        const Halves<T> both = widen<T>(nibbles[g][1], nibbles[g][0]);
        const Strings<1> sixteen[2] = {{both.at[0]}, {both.at[1]}};
        place_planes<T>(sixteen, group[g].d);
        finish_planes(group[g]);
    }
}

}  // namespace
}  // namespace compcoll
