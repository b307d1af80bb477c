// The onebit codec's loops. Each instruction set compiles them. Everything here is in an unnamed namespace, so that the linker
// never mixes functions of two sets.
#pragma once

#include "blocks.h"
#include "onebit.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace compcoll {
namespace {

// ---- sign bits, and values by sign bits ----

// For `count` values at once: extract the sign bits and update the largest magnitude as an integer; choose between two values by
// bits. Fewer values at the end of a block use the general loop with the same result.
#if defined(__AVX512F__)
template <class T>
struct SignVector;
template <>
struct SignVector<float> {
    static constexpr size_t count = 16;
    using Mask = uint16_t;
    static Mask signs(const float* values, __m512i& largest) {
        const __m512i bits = _mm512_loadu_si512(values);
        largest = _mm512_max_epi32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
        return _mm512_movepi32_mask(bits);
    }
    template <bool add>
    static void choose(Mask mask, Reconstruction<float> by_sign, const float* base, float* values) {
        const __m512 chosen = _mm512_mask_blend_ps(mask, _mm512_set1_ps(by_sign.positive), _mm512_set1_ps(by_sign.negative));
        _mm512_storeu_ps(values, add ? _mm512_add_ps(_mm512_loadu_ps(base), chosen) : chosen);
    }
};
template <>
struct SignVector<double> {
    static constexpr size_t count = 8;
    using Mask = uint8_t;
    static Mask signs(const double* values, __m512i& largest) {
        const __m512i bits = _mm512_loadu_si512(values);
        largest = _mm512_max_epi64(largest, _mm512_and_si512(bits, _mm512_set1_epi64(0x7fffffffffffffff)));
        return _mm512_movepi64_mask(bits);
    }
    template <bool add>
    static void choose(Mask mask, Reconstruction<double> by_sign, const double* base, double* values) {
        const __m512d chosen = _mm512_mask_blend_pd(mask, _mm512_set1_pd(by_sign.positive), _mm512_set1_pd(by_sign.negative));
        _mm512_storeu_pd(values, add ? _mm512_add_pd(_mm512_loadu_pd(base), chosen) : chosen);
    }
};
#elif defined(__AVX2__)
template <class T>
struct SignVector;
template <>
struct SignVector<float> {
    static constexpr size_t count = 8;
    using Mask = uint8_t;
    static Mask signs(const float* values, __m256i& largest) {
        const __m256 loaded = _mm256_loadu_ps(values);
        const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(loaded), _mm256_set1_epi32(0x7fffffff));
        largest = _mm256_max_epi32(largest, magnitude);
        return static_cast<Mask>(_mm256_movemask_ps(loaded));
    }
    template <bool add>
    static void choose(Mask mask, Reconstruction<float> by_sign, const float* base, float* values) {
        const __m256i own_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask), own_bit), own_bit);
        const __m256 chosen = _mm256_blendv_ps(
            _mm256_set1_ps(by_sign.positive), _mm256_set1_ps(by_sign.negative), _mm256_castsi256_ps(set));
        _mm256_storeu_ps(values, add ? _mm256_add_ps(_mm256_loadu_ps(base), chosen) : chosen);
    }
};
template <>
struct SignVector<double> {
    static constexpr size_t count = 8;
    using Mask = uint8_t;
    static Mask signs(const double* values, __m256i& largest) {
        const __m256d halves[] = {_mm256_loadu_pd(values), _mm256_loadu_pd(values + 4)};
        for (const __m256d half : halves) {
            const __m256i magnitude = _mm256_and_si256(_mm256_castpd_si256(half), _mm256_set1_epi64x(0x7fffffffffffffff));
            largest = _mm256_blendv_epi8(largest, magnitude, _mm256_cmpgt_epi64(magnitude, largest));
        }
        return static_cast<Mask>(_mm256_movemask_pd(halves[0]) | _mm256_movemask_pd(halves[1]) << 4);
    }
    template <bool add>
    static void choose(Mask mask, Reconstruction<double> by_sign, const double* base, double* values) {
        for (size_t i = 0; i < 8; i += 4, mask = static_cast<Mask>(mask >> 4)) {
            const __m256i own_bit = _mm256_setr_epi64x(1, 2, 4, 8);
            const __m256i set = _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(mask), own_bit), own_bit);
            const __m256d chosen = _mm256_blendv_pd(
                _mm256_set1_pd(by_sign.positive), _mm256_set1_pd(by_sign.negative), _mm256_castsi256_pd(set));
            _mm256_storeu_pd(values + i, add ? _mm256_add_pd(_mm256_loadu_pd(base + i), chosen) : chosen);
        }
    }
};
#endif

template <class T>
uint8_t sign_bit(const T* value) {
    using Bits = typename FloatFormat<T>::Bits;
    return static_cast<uint8_t>(load<Bits>(value) >> (8 * sizeof(T) - 1));
}

// Write the signs, and return the largest magnitude.
template <class T>
T write_signs(const T* values, size_t n, uint8_t* wire) {
    size_t i = 0;
    T largest = 0;
#if defined(__AVX512F__)
    __m512i magnitudes = _mm512_setzero_si512();
#elif defined(__AVX2__)
    __m256i magnitudes = _mm256_setzero_si256();
#endif
#if defined(__AVX2__)
    using Vector = SignVector<T>;
    for (; i + Vector::count <= n; i += Vector::count) store(wire + i / 8, Vector::signs(values + i, magnitudes));
    largest = largest_magnitude(reinterpret_cast<const T*>(&magnitudes), sizeof(magnitudes) / sizeof(T));
#endif
    if (i < n) {
        const T rest[] = {largest, largest_magnitude(values + i, n - i)};
        largest = largest_magnitude(rest, 2);
    }
    alignas(64) uint8_t codes[slice];
    for (size_t m = 0; i < n; i += m) {
        m = smaller(slice, n - i);
        for (size_t j = 0; j < m; ++j) codes[j] = sign_bit(values + i + j);
        pack<1>(codes, m, wire + i / 8);
    }
    return largest;
}

template <bool add, class T>
void read_signs(const uint8_t* wire, size_t n, Reconstruction<T> by_sign, const T* base, T* values) {
    size_t i = 0;
#if defined(__AVX2__)
    using Vector = SignVector<T>;
    for (; i + Vector::count <= n; i += Vector::count)
        Vector::template choose<add>(load<typename Vector::Mask>(wire + i / 8), by_sign, base + i, values + i);
#endif
    using Bits = typename FloatFormat<T>::Bits;
    const Bits positive = bits_as<Bits>(by_sign.positive), difference = positive ^ bits_as<Bits>(by_sign.negative);
    alignas(64) uint8_t codes[slice];
    for (size_t m = 0; i < n; i += m) {
        m = smaller(slice, n - i);
        unpack<1>(wire + i / 8, m, codes);
        SAME_OR_APART for (size_t j = 0; j < m; ++j)
            put<add>(values + i + j, base + i + j, bits_as<T>(static_cast<Bits>(positive ^ (difference & (0 - Bits(codes[j]))))));
    }
}

// ---- one block ----

template <class T>
SignedSums signed_sums(const T* values, size_t n, FixedPoint<T> fixed) {
    SignedSums sums{0, 0, 0};
    for (size_t i = 0; i < n; i += slice) {  // within a slice 32 bits suffice
        const size_t m = smaller(slice, n - i);
        int32_t all = 0, positive = 0;
        for (size_t j = 0; j < m; ++j) {
            const int32_t q = fixed.of(load<T>(values + i + j));
            all += q;
            positive += q > 0 ? q : 0;
        }
        sums.positive += positive;
        sums.negative += all - positive;
    }
    return sums;
}

inline int64_t count_bits(const uint8_t* wire, size_t nbytes) {
    int64_t count = 0;
    size_t i = 0;
    for (; i + 8 <= nbytes; i += 8) count += __builtin_popcountll(load<uint64_t>(wire + i));
    for (; i < nbytes; ++i) count += __builtin_popcountll(wire[i]);
    return count;
}

template <class T>
constexpr size_t header_nbytes(int reconstructions) {
    return static_cast<size_t>(reconstructions) * sizeof(T);
}

template <class T>
void encode_block(const T* values, size_t n, int reconstructions, uint8_t* record) {
    const size_t signs_nbytes = (n + 7) / 8;
    uint8_t* wire = record + header_nbytes<T>(reconstructions);
    const T largest = write_signs(values, n, wire);
    Reconstruction<T> by_sign{T(0), T(0)};
    if (!is_finite(largest) || is_tiny(largest)) {
        if (!is_finite(largest)) by_sign = {quiet_nan<T>(), quiet_nan<T>()};
        std::memset(wire, 0, signs_nbytes);
    } else {
        if (n * sizeof(T) <= prefetched_nbytes) prefetch(values, n, n);  // the next block
        SignedSums sums = signed_sums(values, n, FixedPoint<T>(largest));
        sums.negatives = count_bits(wire, signs_nbytes);
        const auto count = static_cast<int64_t>(n);
        by_sign = reconstructions == 2 ? sums.of_each_sign(count, largest) : sums.of_magnitudes(count, largest);
    }
    store(record, by_sign.positive);
    if (reconstructions == 2) store(record + sizeof(T), by_sign.negative);
}

template <bool add, class T>
void decode_block(const uint8_t* record, size_t n, int reconstructions, const T* base, T* values) {
    const T positive = load<T>(record);
    const Reconstruction<T> by_sign{positive, reconstructions == 2 ? load<T>(record + sizeof(T)) : -positive};
    if (!is_finite(by_sign.positive) || !is_finite(by_sign.negative)) return fill<add>(quiet_nan<T>(), n, base, values);
    read_signs<add>(record + header_nbytes<T>(reconstructions), n, by_sign, base, values);
}

// ---- tiles ----

template <class T>
void encode(const T* values, size_t n, uint8_t* wire, Config config) {
    const size_t block = static_cast<size_t>(config.second);
    for (size_t i = 0; i < n; i += block) {
        encode_block(values + i, smaller(block, n - i), config.first, wire);
        wire += header_nbytes<T>(config.first) + block / 8;
    }
}

template <bool add, class T>
void decode_tile(const uint8_t* wire, size_t n, const T* base, T* values, Config config) {
    const size_t block = static_cast<size_t>(config.second);
    for (size_t i = 0; i < n; i += block) {
        decode_block<add>(wire, smaller(block, n - i), config.first, base + i, values + i);
        wire += header_nbytes<T>(config.first) + block / 8;
    }
}

constexpr Kernels these_onebit = {{encode<float>, decode_tile<false, float>, decode_tile<true, float>},
                                  {encode<double>, decode_tile<false, double>, decode_tile<true, double>}};

}  // namespace
}  // namespace compcoll
