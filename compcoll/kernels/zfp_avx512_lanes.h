// ZFP on AVX-512: vectors with one lane per block, for both element types.
#pragma once

#include "zfp_avx512_tables.h"

namespace compcoll {
namespace {

template <class T> constexpr int group_blocks = 64 / sizeof(T);       // one lane per block
template <class T> constexpr int group_values = 4 * group_blocks<T>;
template <class T> constexpr int halves = sizeof(T) == 4 ? 2 : 1;     // registers with the 64-bit strings of a group

// --- lanes of the element's size ----------------------------------------------------------------------------------------------

template <class T> constexpr bool single = sizeof(T) == 4;

template <class T> STEP V all(int64_t x) { return single<T> ? _mm512_set1_epi32(int(x)) : _mm512_set1_epi64(x); }
template <class T> STEP V add(V a, V b) { return single<T> ? _mm512_add_epi32(a, b) : _mm512_add_epi64(a, b); }
template <class T> STEP V sub(V a, V b) { return single<T> ? _mm512_sub_epi32(a, b) : _mm512_sub_epi64(a, b); }
template <class T> STEP V larger(V a, V b) { return single<T> ? _mm512_max_epu32(a, b) : _mm512_max_epu64(a, b); }
template <class T> STEP V half(V a) { return single<T> ? _mm512_srai_epi32(a, 1) : _mm512_srai_epi64(a, 1); }
template <class T> STEP V left(V a, int n) { return single<T> ? _mm512_slli_epi32(a, n) : _mm512_slli_epi64(a, n); }
template <class T> STEP V right(V a, int n) { return single<T> ? _mm512_srli_epi32(a, n) : _mm512_srli_epi64(a, n); }
template <class T> STEP V right(V a, V n) { return single<T> ? _mm512_srlv_epi32(a, n) : _mm512_srlv_epi64(a, n); }
template <class T> STEP V left_by(V a, V n) { return single<T> ? _mm512_sllv_epi32(a, n) : _mm512_sllv_epi64(a, n); }
template <class T> STEP V leading_zeros(V a) { return single<T> ? _mm512_lzcnt_epi32(a) : _mm512_lzcnt_epi64(a); }

template <class T>
STEP auto below(V a, V b) {  // a < b, unsigned, a mask
    if constexpr (single<T>) return _mm512_cmplt_epu32_mask(a, b);
    else return _mm512_cmplt_epu64_mask(a, b);
}

template <class T> using Mask = decltype(below<T>(V(), V()));

template <class T>
STEP V only(Mask<T> mask, V a) {
    if constexpr (single<T>) return _mm512_maskz_mov_epi32(mask, a);
    else return _mm512_maskz_mov_epi64(mask, a);
}

template <class T>
STEP V left_only(Mask<T> mask, V a, V n) {
    if constexpr (single<T>) return _mm512_maskz_sllv_epi32(mask, a, n);
    else return _mm512_maskz_sllv_epi64(mask, a, n);
}

template <class T>
STEP Mask<T> any_bit(V a, V b) {  // a & b != 0
    if constexpr (single<T>) return _mm512_test_epi32_mask(a, b);
    else return _mm512_test_epi64_mask(a, b);
}

template <class T>
STEP Mask<T> no_bit(Mask<T> mask, V a, V b) {
    if constexpr (single<T>) return _mm512_mask_testn_epi32_mask(mask, a, b);
    else return _mm512_mask_testn_epi64_mask(mask, a, b);
}

template <class T>
STEP Mask<T> not_below(Mask<T> mask, V a, V b) {
    if constexpr (single<T>) return _mm512_mask_cmpge_epu32_mask(mask, a, b);
    else return _mm512_mask_cmpge_epu64_mask(mask, a, b);
}

template <class T>
STEP Mask<T> up_to(V a, V b) {  // a ≤ b, signed
    if constexpr (single<T>) return _mm512_cmple_epi32_mask(a, b);
    else return _mm512_cmple_epi64_mask(a, b);
}

template <class T>
STEP Mask<T> equal(V a, V b) {
    if constexpr (single<T>) return _mm512_cmpeq_epi32_mask(a, b);
    else return _mm512_cmpeq_epi64_mask(a, b);
}

template <class T>
STEP Mask<T> greater(Mask<T> mask, V a, V b) {  // a > b, signed
    if constexpr (single<T>) return _mm512_mask_cmpgt_epi32_mask(mask, a, b);
    else return _mm512_mask_cmpgt_epi64_mask(mask, a, b);
}

template <class T>
STEP V choose(Mask<T> mask, V otherwise, V a) {
    if constexpr (single<T>) return _mm512_mask_mov_epi32(otherwise, mask, a);
    else return _mm512_mask_mov_epi64(otherwise, mask, a);
}

// x[k] holds the blocks from k·lanes/4 on; c[i] gets element i of all blocks, in the lane order of the tables.
template <class T>
STEP void transpose(const V (&x)[4], V (&c)[4]) {
    if constexpr (single<T>) {
        const V a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
        const V d = _mm512_unpacklo_epi32(x[2], x[3]), e = _mm512_unpackhi_epi32(x[2], x[3]);
        c[0] = _mm512_unpacklo_epi64(a, d), c[1] = _mm512_unpackhi_epi64(a, d);
        c[2] = _mm512_unpacklo_epi64(b, e), c[3] = _mm512_unpackhi_epi64(b, e);
    } else {
        const V a = _mm512_unpacklo_epi64(x[0], x[1]), b = _mm512_unpackhi_epi64(x[0], x[1]);
        const V d = _mm512_unpacklo_epi64(x[2], x[3]), e = _mm512_unpackhi_epi64(x[2], x[3]);
        c[0] = _mm512_shuffle_i64x2(a, d, 0x88), c[2] = _mm512_shuffle_i64x2(a, d, 0xdd);
        c[1] = _mm512_shuffle_i64x2(b, e, 0x88), c[3] = _mm512_shuffle_i64x2(b, e, 0xdd);
    }
}

template <class T>
STEP void transpose_back(const V (&c)[4], V (&x)[4]) {
    if constexpr (single<T>) {
        transpose<T>(c, x);  // the transpose is its own inverse
    } else {
        const V a = _mm512_unpacklo_epi64(c[0], c[1]), b = _mm512_unpackhi_epi64(c[0], c[1]);
        const V d = _mm512_unpacklo_epi64(c[2], c[3]), e = _mm512_unpackhi_epi64(c[2], c[3]);
        const V front = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), back = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        x[0] = _mm512_permutex2var_epi64(a, front, d), x[2] = _mm512_permutex2var_epi64(a, back, d);
        x[1] = _mm512_permutex2var_epi64(b, front, e), x[3] = _mm512_permutex2var_epi64(b, back, e);
    }
}

// --- strings of bits: one per quadword, so that a group of floats needs two registers ----------------------------------------

template <class T>
struct Halves {
    V at[halves<T>];
};

// Each quadword gets one double word of its block in the high half, another one in the low half.
template <class T>
STEP Halves<T> widen(V high, V low) {
    if constexpr (single<T>) return {{_mm512_unpacklo_epi32(low, high), _mm512_unpackhi_epi32(low, high)}};
    else return {{ternary<b_if_c_else_a>(high, low, low_half())}};
}

template <class T>
STEP Halves<T> zero_extend(V a) {
    if constexpr (single<T>) return {{_mm512_unpacklo_epi32(a, V()), _mm512_unpackhi_epi32(a, V())}};
    else return {{a}};
}

// W words per string.
template <int W>
struct Strings {
    V word[W];
};

}  // namespace
}  // namespace compcoll
