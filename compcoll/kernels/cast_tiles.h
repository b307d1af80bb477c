// The cast codec's loops. Each instruction set compiles them. Everything here is in an unnamed namespace, so that the linker never
// mixes functions of two sets.
#pragma once

#include "cast.h"
#include "tile.h"
#include "unaligned.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace compcoll {
namespace {

// ---- float to half precision and back ----

#if defined(__AVX512F__)
struct HalfInstructions {
    static constexpr size_t lanes = 16;
    static void encode(const float* values, uint8_t* wire) {
        const __m256i halves = _mm512_maskz_cvtps_ph(0xffff, _mm512_loadu_ps(values), _MM_FROUND_TO_NEAREST_INT);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(wire), halves);
    }
    template <bool add>
    static void decode(const uint8_t* wire, const float* base, float* values) {
        const __m512 decoded = _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(wire)));
        _mm512_storeu_ps(values, add ? _mm512_add_ps(_mm512_loadu_ps(base), decoded) : decoded);
    }
};
#elif defined(__F16C__)
struct HalfInstructions {
    static constexpr size_t lanes = 8;
    static void encode(const float* values, uint8_t* wire) {
        const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(values), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(wire), halves);
    }
    template <bool add>
    static void decode(const uint8_t* wire, const float* base, float* values) {
        const __m256 decoded = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(wire)));
        _mm256_storeu_ps(values, add ? _mm256_add_ps(_mm256_loadu_ps(base), decoded) : decoded);
    }
};
#endif

#if defined(__F16C__)
// Whether HalfInstructions apply. The last values, fewer than its lanes, use the general loop with the same result.
template <class Wire>
constexpr bool has_instructions = false;
template <>
constexpr bool has_instructions<Float16> = true;
#endif

template <class Wire>
void encode_as(const float* __restrict values, size_t n, uint8_t* __restrict wire) {
    size_t i = 0;
#if defined(__F16C__)
    if constexpr (has_instructions<Wire>)
        for (; i + HalfInstructions::lanes <= n; i += HalfInstructions::lanes) HalfInstructions::encode(values + i, wire + 2 * i);
#endif
    const size_t line = i + before_line(values + i, n - i);  // the same loop twice: the long one starts at a cache line
    for (; i < line; ++i) store(wire + 2 * i, Wire::narrowed(load<float>(values + i)));
    for (; i < n; ++i) store(wire + 2 * i, Wire::narrowed(load<float>(values + i)));
}

template <class Wire, bool add>
void decode_as(const uint8_t* __restrict wire, size_t n, const float* base, float* values) {
    size_t i = 0;
#if defined(__F16C__)
    if constexpr (has_instructions<Wire>)
        for (; i + HalfInstructions::lanes <= n; i += HalfInstructions::lanes)
            HalfInstructions::decode<add>(wire + 2 * i, base + i, values + i);
#endif
    SAME_OR_APART for (; i < n; ++i) put<add>(values + i, base + i, Wire::widened(load<uint16_t>(wire + 2 * i)));
}

// ---- double to half precision and back, via floats ----

constexpr size_t slice = 512;  // floats in the first-level cache between the two steps

template <class Wire>
void encode_as(const double* __restrict values, size_t n, uint8_t* __restrict wire) {
    alignas(64) float floats[slice];
    for (size_t i = 0, m = 0; i < n; i += m) {
        m = before_line(values + i, n - i);
        if (m == 0) m = n - i < slice ? n - i : slice;
        for (size_t j = 0; j < m; ++j) floats[j] = to_round_further(load<double>(values + i + j));
        encode_as<Wire>(floats, m, wire + 2 * i);
    }
}

template <class Wire, bool add>
void decode_as(const uint8_t* __restrict wire, size_t n, const double* base, double* values) {
    alignas(64) float floats[slice];
    for (size_t i = 0; i < n; i += slice) {
        const size_t m = n - i < slice ? n - i : slice;
        decode_as<Wire, false>(wire + 2 * i, m, floats, floats);
        SAME_OR_APART for (size_t j = 0; j < m; ++j) put<add>(values + i + j, base + i + j, double_of(floats[j]));
    }
}

// ---- double to float and back; copies ----

void encode_as_floats(const double* __restrict values, size_t n, uint8_t* __restrict wire) {
    for (size_t i = 0; i < n; ++i) store(wire + 4 * i, float_of(load<double>(values + i)));
}

template <bool add>
void decode_floats(const uint8_t* __restrict wire, size_t n, const double* base, double* values) {
    SAME_OR_APART for (size_t i = 0; i < n; ++i) put<add>(values + i, base + i, double_of(load<float>(wire + 4 * i)));
}

template <class T>
void encode_copy(const T* values, size_t n, uint8_t* wire) {
    if (n > 0) std::memcpy(wire, values, n * sizeof(T));
}

template <bool add, class T>
void decode_copy(const uint8_t* __restrict wire, size_t n, const T* base, T* values) {
    SAME_OR_APART for (size_t i = 0; i < n; ++i) put<add>(values + i, base + i, load<T>(wire + i * sizeof(T)));
}

// ---- tiles; the caller ensures that the wire's type is at most as wide as the values' ----

template <class T>
void encode(const T* values, size_t n, uint8_t* wire, Config config) {
    const auto storage = static_cast<Storage>(config.first);
    if (storage == Storage::float16) return encode_as<Float16>(values, n, wire);
    if (storage == Storage::bfloat16) return encode_as<BFloat16>(values, n, wire);
    if constexpr (sizeof(T) == 8)
        if (storage == Storage::float32) return encode_as_floats(values, n, wire);
    encode_copy(values, n, wire);
}

template <bool add, class T>
void decode_tile(const uint8_t* wire, size_t n, const T* base, T* values, Config config) {
    const auto storage = static_cast<Storage>(config.first);
    if (storage == Storage::float16) return decode_as<Float16, add>(wire, n, base, values);
    if (storage == Storage::bfloat16) return decode_as<BFloat16, add>(wire, n, base, values);
    if constexpr (sizeof(T) == 8)
        if (storage == Storage::float32) return decode_floats<add>(wire, n, base, values);
    decode_copy<add>(wire, n, base, values);
}

constexpr Kernels these_cast = {{encode<float>, decode_tile<false, float>, decode_tile<true, float>},
                                {encode<double>, decode_tile<false, double>, decode_tile<true, double>}};

}  // namespace
}  // namespace compcoll
