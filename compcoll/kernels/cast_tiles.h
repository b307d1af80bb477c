// The cast codec's loops. Each cast_*.cpp compiles them for its instruction set: everything here is in an unnamed
// namespace, so that the linker never takes one set's function for another's.
#pragma once

#include "cast.h"
#include "tile.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little endian");

namespace compcoll {
namespace {

template <class T>
COMPCOLL_HD T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

template <class T>
COMPCOLL_HD void store(void* to, T value) {
    std::memcpy(to, &value, sizeof(T));
}

// How many of the first values the half-precision instructions have done; the general loops do the rest.
template <class Wire, class T>
COMPCOLL_HD size_t encode_by_instruction(const T*, size_t, uint8_t*) { return 0; }

template <class Wire, bool add, class T>
COMPCOLL_HD size_t decode_by_instruction(const uint8_t*, size_t, T*) { return 0; }

#if defined(__F16C__)

#if defined(__AVX512F__)
using Floats = __m512;
using Halves = __m256i;
COMPCOLL_HD Floats load_floats(const float* from) { return _mm512_loadu_ps(from); }
COMPCOLL_HD void store_floats(float* to, Floats x) { _mm512_storeu_ps(to, x); }
COMPCOLL_HD Halves load_halves(const uint8_t* from) { return _mm256_loadu_si256((const __m256i*)from); }
COMPCOLL_HD void store_halves(uint8_t* to, Halves h) { _mm256_storeu_si256((__m256i*)to, h); }
COMPCOLL_HD Halves halves_of(Floats x) { return _mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT); }
COMPCOLL_HD Floats floats_of(Halves h) { return _mm512_maskz_cvtph_ps(0xffff, h); }
#else
using Floats = __m256;
using Halves = __m128i;
COMPCOLL_HD Floats load_floats(const float* from) { return _mm256_loadu_ps(from); }
COMPCOLL_HD void store_floats(float* to, Floats x) { _mm256_storeu_ps(to, x); }
COMPCOLL_HD Halves load_halves(const uint8_t* from) { return _mm_loadu_si128((const __m128i*)from); }
COMPCOLL_HD void store_halves(uint8_t* to, Halves h) { _mm_storeu_si128((__m128i*)to, h); }
COMPCOLL_HD Halves halves_of(Floats x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
COMPCOLL_HD Floats floats_of(Halves h) { return _mm256_cvtph_ps(h); }
#endif

constexpr size_t lanes = sizeof(Floats) / sizeof(float);

template <>
COMPCOLL_HD size_t encode_by_instruction<Float16, float>(const float* values, size_t n, uint8_t* wire) {
    size_t i = 0;
    for (; i + lanes <= n; i += lanes) store_halves(wire + 2 * i, halves_of(load_floats(values + i)));
    return i;
}

template <bool add>
COMPCOLL_HD size_t decode_halves(const uint8_t* wire, size_t n, float* values) {
    size_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        const Floats decoded = floats_of(load_halves(wire + 2 * i));
        store_floats(values + i, add ? load_floats(values + i) + decoded : decoded);
    }
    return i;
}

template <>
COMPCOLL_HD size_t decode_by_instruction<Float16, false, float>(const uint8_t* wire, size_t n, float* values) {
    return decode_halves<false>(wire, n, values);
}

template <>
COMPCOLL_HD size_t decode_by_instruction<Float16, true, float>(const uint8_t* wire, size_t n, float* values) {
    return decode_halves<true>(wire, n, values);
}

#endif  // __F16C__

template <class Wire, class T>
void encode_as(const T* __restrict values, size_t n, uint8_t* __restrict wire) {
    using Bits = typename Wire::Bits;
    for (size_t i = encode_by_instruction<Wire>(values, n, wire); i < n; ++i)
        store(wire + i * sizeof(Bits), narrowed<Wire>(load<T>(values + i)));
}

template <class Wire, bool add, class T>
void decode_as(const uint8_t* __restrict wire, size_t n, T* __restrict values) {
    using Bits = typename Wire::Bits;
    for (size_t i = decode_by_instruction<Wire, add>(wire, n, values); i < n; ++i) {
        const T decoded = widened<T, Wire>(load<Bits>(wire + i * sizeof(Bits)));
        store(values + i, add ? load<T>(values + i) + decoded : decoded);
    }
}

template <class T>
void add_copied(const uint8_t* __restrict wire, size_t n, T* __restrict values) {
    for (size_t i = 0; i < n; ++i) store(values + i, load<T>(values + i) + load<T>(wire + i * sizeof(T)));
}

// The wire's type is at most as wide as the values': callers see to that.
template <class T>
void encode(const T* values, size_t n, uint8_t* wire, Config config) {
    const auto storage = static_cast<Storage>(config.first);
    if (storage == Storage::float16) encode_as<Float16>(values, n, wire);
    else if (storage == Storage::bfloat16) encode_as<BFloat16>(values, n, wire);
    else if (sizeof(T) == 8 && storage == Storage::float32) {
        if constexpr (sizeof(T) == 8) encode_as<Float32>(values, n, wire);
    } else if (n > 0) std::memcpy(wire, values, n * sizeof(T));
}

template <class T>
void decode(const uint8_t* wire, size_t n, T* values, Config config) {
    const auto storage = static_cast<Storage>(config.first);
    if (storage == Storage::float16) decode_as<Float16, false>(wire, n, values);
    else if (storage == Storage::bfloat16) decode_as<BFloat16, false>(wire, n, values);
    else if (sizeof(T) == 8 && storage == Storage::float32) {
        if constexpr (sizeof(T) == 8) decode_as<Float32, false>(wire, n, values);
    } else if (n > 0) std::memcpy(values, wire, n * sizeof(T));
}

template <class T>
void decode_add(const uint8_t* wire, size_t n, T* values, Config config) {
    const auto storage = static_cast<Storage>(config.first);
    if (storage == Storage::float16) decode_as<Float16, true>(wire, n, values);
    else if (storage == Storage::bfloat16) decode_as<BFloat16, true>(wire, n, values);
    else if (sizeof(T) == 8 && storage == Storage::float32) {
        if constexpr (sizeof(T) == 8) decode_as<Float32, true>(wire, n, values);
    } else add_copied(wire, n, values);
}

constexpr Kernels these_kernels = {{encode<float>, decode<float>, decode_add<float>},
                                   {encode<double>, decode<double>, decode_add<double>}};

}  // namespace
}  // namespace compcoll
