// The widest vectors of the instruction set that a file is compiled for. They are in an unnamed namespace, because files compiled
// for different instruction sets must not share code.
#pragma once

#include "floats.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace compcoll {
namespace {

#if defined(__AVX512F__)
constexpr size_t vector_nbytes = 64;
#elif defined(__AVX__)
constexpr size_t vector_nbytes = 32;
#else
constexpr size_t vector_nbytes = 16;
#endif

template <class T>
struct VectorOf {
    typedef T Values __attribute__((vector_size(vector_nbytes)));
    typedef BitsOf<T> Bits __attribute__((vector_size(vector_nbytes)));
    typedef SignedOf<T> Signed __attribute__((vector_size(vector_nbytes)));
};

template <class T>
constexpr size_t lanes = vector_nbytes / sizeof(T);

// The lanes' sign bits, that of the first lane in the lowest bit.
template <class T>
COMPCOLL_HD uint32_t sign_bits(typename VectorOf<T>::Signed vector) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 8) return _mm512_movepi64_mask(bits_as<__m512i>(vector));
    else return _mm512_movepi32_mask(bits_as<__m512i>(vector));
#elif defined(__AVX__)
    if constexpr (sizeof(T) == 8) return static_cast<uint32_t>(_mm256_movemask_pd(bits_as<__m256d>(vector)));
    else return static_cast<uint32_t>(_mm256_movemask_ps(bits_as<__m256>(vector)));
#elif defined(__SSE2__)
    if constexpr (sizeof(T) == 8) return static_cast<uint32_t>(_mm_movemask_pd(bits_as<__m128d>(vector)));
    else return static_cast<uint32_t>(_mm_movemask_ps(bits_as<__m128>(vector)));
#else
    uint32_t bits = 0;
    for (size_t lane = 0; lane < lanes<T>; ++lane) bits |= static_cast<uint32_t>(vector[lane] < 0) << lane;
    return bits;
#endif
}

// For each lane, one of two values by a bit of the mask.
template <class T, class Values = typename VectorOf<T>::Values>
COMPCOLL_HD Values chosen(uint32_t mask, Values if_clear, Values if_set) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 8) return _mm512_mask_blend_pd(static_cast<__mmask8>(mask), if_clear, if_set);
    else return _mm512_mask_blend_ps(static_cast<__mmask16>(mask), if_clear, if_set);
#else
    typename VectorOf<T>::Bits own_bit = {};
    for (size_t lane = 0; lane < lanes<T>; ++lane) own_bit[lane] = BitsOf<T>(1) << lane;
    return (own_bit & BitsOf<T>(mask)) != 0 ? if_set : if_clear;
#endif
}

}  // namespace
}  // namespace compcoll
