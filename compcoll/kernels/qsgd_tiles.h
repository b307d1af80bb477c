// The qsgd codec's loops. Each instruction set compiles them. Everything here is in an unnamed namespace, so that the linker never
// mixes functions of two sets.
#pragma once

#include "philox_tiles.h"
#include "qsgd.h"

namespace compcoll {
namespace {

// ---- the norm ----

template <class T>
uint64_t sum_of_squares(const T* values, size_t n, FixedPoint<T> fixed) {
    uint64_t sum = 0;
    size_t i = 0;
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) {
        __m512i even = _mm512_setzero_si512(), odd = even;
        for (; i + 16 <= n; i += 16) {
            const __m512i q = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_loadu_ps(values + i), _mm512_set1_ps(fixed.factor)));
            const __m512i shifted = _mm512_srli_epi64(q, 32);
            even = _mm512_add_epi64(even, _mm512_mul_epi32(q, q));
            odd = _mm512_add_epi64(odd, _mm512_mul_epi32(shifted, shifted));
        }
        sum = static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(even, odd)));
    }
#endif
    for (; i < n; ++i) sum += fixed.square(load<T>(values + i));
    return sum;
}

// Return h as stored in the record.
template <class T>
T half_step_of(const T* values, size_t n, int levels, bool euclidean) {
    const T largest = largest_magnitude(values, n);
    if (!is_finite(largest)) return quiet_nan<T>();
    if (is_tiny(largest)) return T(0);
    double norm = mantissa_of(largest);
    if (euclidean) {
        const double root = root_of_squares(sum_of_squares(values, n, FixedPoint<T>(largest)));
        norm = root > norm ? root : norm;
    }
    return qsgd_half_step(largest, norm, levels);
}

template <class T>
void quantize(const T* __restrict values, size_t n, StochasticQuantizer<T> quantizer, const uint16_t* __restrict random,
              uint8_t* __restrict codes) {
    for (size_t i = 0; i < n; ++i) codes[i] = quantizer.code(load<T>(values + i), random[i]);
}

template <class T>
void quantize_to_nearest(const T* __restrict values, size_t n, StochasticQuantizer<T> quantizer, uint8_t* __restrict codes) {
    for (size_t i = 0; i < n; ++i) codes[i] = quantizer.code(load<T>(values + i), 32768);
}

template <class T>
void encode_block(const T* values, size_t n, int bits, int variant, const Draws& draws, size_t begin,
                  uint8_t* record) {
    const int levels = qsgd_levels(bits);
    const T h = half_step_of(values, n, levels, variant & qsgd_euclidean);
    store(record, h);
    uint8_t* wire = record + sizeof(T);
    if (!is_finite(h) || biased_exponent(h) == 0) {
        std::memset(wire, 0, (n * static_cast<size_t>(bits) + 7) / 8);
        return;
    }
    const StochasticQuantizer<T> quantizer(h, levels);
    alignas(64) uint8_t packing_codes[slice];
    alignas(64) uint16_t random[slice];
    for (size_t i = 0; i < n; i += slice) {
        const size_t m = smaller(slice, n - i);
        uint8_t* codes = bits == 8 ? wire + i : packing_codes;
        if (n * sizeof(T) <= prefetched_nbytes) prefetch(values + i, n, m);  // the next block
        if (variant & qsgd_nearest) {
            quantize_to_nearest(values + i, m, quantizer, codes);
        } else {
            draws.fill(begin + i, m, random);
            quantize(values + i, m, quantizer, random, codes);
        }
        if (bits != 8) packings[bits - 1].pack(codes, m, wire + i / 8 * static_cast<size_t>(bits));
    }
}

template <bool add, class T>
void dequantize(const uint8_t* __restrict codes, size_t n, T h, int levels, const T* base, T* values) {
    SAME_OR_APART for (size_t i = 0; i < n; ++i) put<add>(values + i, base + i, qsgd_value(codes[i], h, levels));
}

template <bool add, class T>
void decode_block(const uint8_t* record, size_t n, int bits, const T* base, T* values) {
    const T h = load<T>(record);
    if (!is_finite(h)) return fill<add>(quiet_nan<T>(), n, base, values);
    if (biased_exponent(h) == 0) return fill<add>(T(0), n, base, values);
    const int levels = qsgd_levels(bits);
    const uint8_t* wire = record + sizeof(T);
    if (bits == 8) return dequantize<add>(wire, n, h, levels, base, values);
    alignas(64) uint8_t codes[slice];
    for (size_t i = 0; i < n; i += slice) {
        const size_t m = smaller(slice, n - i);
        packings[bits - 1].unpack(wire + i / 8 * static_cast<size_t>(bits), m, codes);
        dequantize<add>(codes, m, h, levels, base + i, values + i);
    }
}

// ---- tiles ----

template <class T>
void encode(const T* values, size_t n, uint8_t* wire, Config config) {
    const size_t block = static_cast<size_t>(config.second), bits = static_cast<size_t>(config.first);
    const Draws draws{Keys(config.seed), config.rng_counter, config.position};
    for (size_t i = 0; i < n; i += block) {
        encode_block(values + i, smaller(block, n - i), config.first, config.variant, draws, i, wire);
        wire += sizeof(T) + block * bits / 8;
    }
}

template <bool add, class T>
void decode_tile(const uint8_t* wire, size_t n, const T* base, T* values, Config config) {
    const size_t block = static_cast<size_t>(config.second), bits = static_cast<size_t>(config.first);
    for (size_t i = 0; i < n; i += block) {
        decode_block<add>(wire, smaller(block, n - i), config.first, base + i, values + i);
        wire += sizeof(T) + block * bits / 8;
    }
}

constexpr Kernels these_qsgd = {{encode<float>, decode_tile<false, float>, decode_tile<true, float>},
                                {encode<double>, decode_tile<false, double>, decode_tile<true, double>}};

}  // namespace
}  // namespace compcoll
