// ZFP on AVX-512: the values that a decoder will get for a group of floats, computed from the coefficients in the encoder's
// registers.
//
// Usually three coefficients are significant where the bits run out. Planes have four bits each there, and the end of the
// string decides how many bits each coefficient keeps. Otherwise tables give the rest of each plane.
#pragma once

#include "zfp_avx512_decode.h"
#include "zfp_avx512_encode.h"

namespace compcoll {
namespace {

// The same as read_head computes from a string.
template <class T>
STEP Head<T> head_of(const Group<T>& g) {
    using F = zfp::Format<T>;
    Head<T> head;
    const int place = F::mantissa_bits - 1;  // bit position of the header, 2·(exponent field) + 3
    const V scale = sub<T>(left<T>(g.header, place), all<T>((int64_t(2 * F::lowest_exponent) + 3) << place));
    head.scale = choose<T>(equal<T>(g.header, all<T>(1)), only<T>(g.coded, scale), all<T>(int64_t(quiet_nan_bits<T>)));
    head.lowest = equal<T>(g.header, all<T>(2 * F::lowest_exponent + 3));
    return head;
}

// For groups with enough bits in eight planes, whose codes would end at `end`. Return false if in some lane fewer than three
// coefficients are significant when the bits run out.
STEP bool truncate(const Group<float>& g, V end, int maxbits, Decoded<float>& cut) {
    using T = float;
    // coefficient i loses the lowest (lost + i) / 4 planes: a truncated plane lacks the bits of its last coefficients
    const V lost = add<T>(end, all<T>(4 * 24 - maxbits));
    V kept[4];
    UNROLL for (int i = 0; i < 4; ++i) {
        kept[i] = left_by<T>(all<T>(-1), right<T>(add<T>(lost, all<T>(i)), 2));
        cut.d[i] = right<T>(_mm512_and_si512(g.d[i], kept[i]), g.empty);
    }
    recorrelate<T>(cut.d);
    cut.head = head_of<T>(g);
    return no_bit<T>(g.coded, _mm512_or_si512(g.d[2], g.d[3]), kept[3]) == 0;
}

// --- wherever the bits run out ------------------------------------------------------------------------------------------------

// The bits kept of a plane when 2·half bits of its code are left, one more from index 64 on; 7 means all. index = plane | n << 4.
template <int half>
constexpr Bytes<128> cut_planes() {
    Bytes<128> table{};
    for (int i = 0; i < 128; ++i) {
        const int left = 2 * half + i / 64, significant = i / 16 % 4;
        const zfp::Plane code = zfp::encode_plane(uint32_t(i & 15), significant);
        table.at[i] = uint8_t(zfp::decode_plane(code.bits & ((1u << left) - 1), significant, left).bits);
    }
    return table;
}

template <int half>
STEP V cut_plane(V index) {
    static constexpr Bytes<128> table = cut_planes<half>();
    return _mm512_permutex2var_epi8(load(table.at), index, load(table.at + 64));
}

// The bits kept of an octet's planes, one byte per plane. Their codes begin at `at`, which is set to their end.
STEP V kept_planes(V matrices, V& at, int maxbits) {
    const V index = _mm512_gf2p8affine_epi64_epi8(load(&planes_down), matrices, 0);
    const V length = _mm512_permutexvar_epi8(index, load(&code_length));
    V ends = _mm512_add_epi64(length, _mm512_slli_epi64(length, 8));  // sums of the lengths up to each plane
    ends = _mm512_add_epi64(ends, _mm512_slli_epi64(ends, 16));
    ends = _mm512_add_epi64(ends, _mm512_slli_epi64(ends, 32));
    const V room = _mm512_max_epi64(_mm512_sub_epi64(_mm512_set1_epi64(maxbits), at), V());
    at = _mm512_add_epi64(at, _mm512_srli_epi64(ends, 56));
    const V first_byte = _mm512_set4_epi32(0x08080808, 0x08080808, 0, 0);  // of each quadword
    V left = _mm512_sub_epi8(_mm512_add_epi8(_mm512_shuffle_epi8(room, first_byte), length), ends);
    left = _mm512_min_epi8(_mm512_max_epi8(left, V()), _mm512_set1_epi8(zfp::longest_plane_code));
    const V odd = ternary<b_if_c_else_a>(index, _mm512_slli_epi16(left, 6), _mm512_set1_epi8(64));
    const __mmask64 twos = _mm512_test_epi8_mask(left, _mm512_set1_epi8(2));
    const __mmask64 fours = _mm512_test_epi8_mask(left, _mm512_set1_epi8(4));
    const V few = _mm512_mask_mov_epi8(cut_plane<0>(odd), twos, cut_plane<1>(odd));
    const V many = _mm512_mask_mov_epi8(cut_plane<2>(odd), twos, cut_plane<3>(odd));
    return _mm512_mask_mov_epi8(few, fours, many);
}

// Compute one of the two octets, as in octets_of. Return true if there are more bits.
template <int octet, int groups>
STEP bool keep_octet(const Group<float> (&g)[groups], const Significance (&n)[groups], Halves<float> (&at)[groups], int maxbits,
                    Halves<float> (&octets)[groups]) {
    int unfinished = 0;
    UNROLL for (int k = 0; k < groups; ++k) {
        const Halves<float> matrices = octet_matrices<float, octet>(g[k].d, n[k]);
        UNROLL for (int h = 0; h < 2; ++h) {
            const V kept = kept_planes(matrices.at[h], at[k].at[h], maxbits);
            const V rows = _mm512_gf2p8affine_epi64_epi8(octet == 0 ? load(&bits_up_low) : load(&bits_up_high), kept, 0);
            octets[k].at[h] = octet == 0 ? rows : _mm512_or_si512(octets[k].at[h], rows);
            unfinished |= _mm512_cmplt_epu64_mask(at[k].at[h], _mm512_set1_epi64(maxbits));
        }
    }
    return unfinished != 0;
}

template <int groups>
STEP void truncate_anywhere(const Group<float> (&g)[groups], int maxbits, Decoded<float> (&cut)[groups]) {
    using T = float;
    Significance n[groups];
    Halves<T> at[groups], octets[groups];
    UNROLL for (int k = 0; k < groups; ++k) n[k] = significance(g[k]), at[k] = zero_extend<T>(g[k].start);
    // sixteen planes: more than 22 bits can hold
    if (keep_octet<0>(g, n, at, maxbits, octets)) keep_octet<1>(g, n, at, maxbits, octets);
    UNROLL for (int k = 0; k < groups; ++k) {
        place_word<T, 0>(octets[k], cut[k].d);
        cut[k].head = head_of<T>(g[k]), cut[k].head.empty = g[k].empty;
        finish_planes(cut[k]);
    }
}

[[gnu::noinline]] Decoded<float> truncated_anywhere(Group<float> g, int maxbits) {
    const Group<float> groups[] = {g};
    Decoded<float> cut[1];
    truncate_anywhere(groups, maxbits, cut);
    return cut[0];
}

}  // namespace
}  // namespace compcoll
