// The qsgd codec's loops. Each instruction set compiles them. Everything here is in an unnamed namespace, so that the linker never
// mixes functions of two sets.
#pragma once

#include "philox_tiles.h"
#include "qsgd.h"

namespace compcoll {
namespace {

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

template <class T>
void quantize(const T* __restrict values, size_t n, StochasticQuantizer<T> quantizer, const uint16_t* __restrict random,
              uint8_t* __restrict codes) {
    for (size_t i = 0; i < n; ++i) codes[i] = quantizer.code(load<T>(values + i), random[i]);
}

template <class T>
void encode(const T* values, size_t n, uint8_t* wire, Config config) {
    const QSGD<T> codec(config.first);
    const Draws draws{Keys(config.seed), config.rng_counter, config.position};
    encode_blocks(
        codec, values, n, static_cast<size_t>(config.second), wire,
        [&](const T* block, size_t length) {
            return codec.header(largest_magnitude(block, length), config.variant,
                                [&](FixedPoint<T> fixed) { return sum_of_squares(block, length, fixed); });
        },
        [&](auto quantizer, size_t i, size_t m, uint8_t* codes) {
            if (config.variant & qsgd_nearest) return quantize(values + i, m, quantizer, codes);
            alignas(64) uint16_t random[slice];
            draws.fill(i, m, random);
            quantize(values + i, m, quantizer, random, codes);
        });
}

template <class T>
constexpr TileFunctions<T> functions = {encode<T>, decode_blocks<QSGD, false, T>, decode_blocks<QSGD, true, T>};

constexpr Kernels these_qsgd = {functions<float>, functions<double>};

}  // namespace
}  // namespace compcoll
