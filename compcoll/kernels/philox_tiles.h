// Philox on vectors: the same numbers, with one block per lane.
#pragma once

#include "blocks.h"
#include "philox.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace compcoll {
namespace {

#if defined(__SSE2__)

// 64-bit lanes whose lower halves are multiplied; the upper halves are ignored.
#if defined(__AVX512F__)
struct Lanes {
    using Vector = __m512i;
    static constexpr size_t count = 8;
    static Vector same(uint64_t value) { return _mm512_set1_epi64(static_cast<long long>(value)); }
    static Vector product(Vector a, Vector b) { return _mm512_mul_epu32(a, b); }
    static Vector upper(Vector a) { return _mm512_srli_epi64(a, 32); }
    static Vector raised(Vector a) { return _mm512_slli_epi64(a, 32); }
    static Vector mixed(Vector a, Vector b, Vector c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
    static Vector either(Vector a, Vector b) { return _mm512_or_si512(a, b); }
    static Vector both(Vector a, Vector b) { return _mm512_and_si512(a, b); }
    static Vector sum(Vector a, Vector b) { return _mm512_add_epi64(a, b); }
    static Vector counted() { return _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); }
    static Vector even(Vector a, Vector b) { return _mm512_unpacklo_epi64(a, b); }
    static Vector odd(Vector a, Vector b) { return _mm512_unpackhi_epi64(a, b); }
};
#elif defined(__AVX2__)
struct Lanes {
    using Vector = __m256i;
    static constexpr size_t count = 4;
    static Vector same(uint64_t value) { return _mm256_set1_epi64x(static_cast<long long>(value)); }
    static Vector product(Vector a, Vector b) { return _mm256_mul_epu32(a, b); }
    static Vector upper(Vector a) { return _mm256_srli_epi64(a, 32); }
    static Vector raised(Vector a) { return _mm256_slli_epi64(a, 32); }
    static Vector mixed(Vector a, Vector b, Vector c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
    static Vector either(Vector a, Vector b) { return _mm256_or_si256(a, b); }
    static Vector both(Vector a, Vector b) { return _mm256_and_si256(a, b); }
    static Vector sum(Vector a, Vector b) { return _mm256_add_epi64(a, b); }
    static Vector counted() { return _mm256_setr_epi64x(0, 2, 1, 3); }
    static Vector even(Vector a, Vector b) { return _mm256_unpacklo_epi64(a, b); }
    static Vector odd(Vector a, Vector b) { return _mm256_unpackhi_epi64(a, b); }
};
#else
struct Lanes {
    using Vector = __m128i;
    static constexpr size_t count = 2;
    static Vector same(uint64_t value) { return _mm_set1_epi64x(static_cast<long long>(value)); }
    static Vector product(Vector a, Vector b) { return _mm_mul_epu32(a, b); }
    static Vector upper(Vector a) { return _mm_srli_epi64(a, 32); }
    static Vector raised(Vector a) { return _mm_slli_epi64(a, 32); }
    static Vector mixed(Vector a, Vector b, Vector c) { return _mm_xor_si128(_mm_xor_si128(a, b), c); }
    static Vector either(Vector a, Vector b) { return _mm_or_si128(a, b); }
    static Vector both(Vector a, Vector b) { return _mm_and_si128(a, b); }
    static Vector sum(Vector a, Vector b) { return _mm_add_epi64(a, b); }
    static Vector counted() { return _mm_set_epi64x(1, 0); }
    static Vector even(Vector a, Vector b) { return _mm_unpacklo_epi64(a, b); }
    static Vector odd(Vector a, Vector b) { return _mm_unpackhi_epi64(a, b); }
};
#endif

// The keys of all rounds, for use in lanes.
struct Keys {
    uint64_t first[Philox::rounds], second[Philox::rounds];

    explicit Keys(uint64_t seed) {
        uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
        for (int round = 0; round < Philox::rounds; ++round) {
            first[round] = low;
            second[round] = high;
            low += Philox::first_step;
            high += Philox::second_step;
        }
    }
};

constexpr size_t blocks_at_once = 2 * Lanes::count;  // two vectors hide each other's latency

// Store blocks in order. The lanes are numbered so that one interleaving yields this order.
COMPCOLL_HD void random_blocks(const Keys& keys, uint64_t rng_counter, uint64_t index, uint8_t* out) {
    using Vector = Lanes::Vector;
    const Vector lower = Lanes::same(0xffffffff);
    const Vector first_factor = Lanes::same(Philox::first_factor), second_factor = Lanes::same(Philox::second_factor);
    Vector a[2], b[2], c[2], d[2];
    for (size_t v = 0; v < 2; ++v) {
        a[v] = Lanes::sum(Lanes::same(index + v * Lanes::count), Lanes::counted());
        b[v] = Lanes::upper(a[v]);
        c[v] = Lanes::same(rng_counter);
        d[v] = Lanes::same(rng_counter >> 32);
    }
#pragma GCC unroll 10
    for (int round = 0; round < Philox::rounds; ++round) {
        for (size_t v = 0; v < 2; ++v) {
            const Vector first = Lanes::product(a[v], first_factor), second = Lanes::product(c[v], second_factor);
            a[v] = Lanes::mixed(Lanes::upper(second), b[v], Lanes::same(keys.first[round]));
            b[v] = second;
            c[v] = Lanes::mixed(Lanes::upper(first), d[v], Lanes::same(keys.second[round]));
            d[v] = first;
        }
    }
    for (size_t v = 0; v < 2; ++v) {
        const Vector front = Lanes::either(Lanes::both(a[v], lower), Lanes::raised(b[v]));
        const Vector back = Lanes::either(Lanes::both(c[v], lower), Lanes::raised(d[v]));
        store(out + (2 * v) * 8 * Lanes::count, Lanes::even(front, back));
        store(out + (2 * v + 1) * 8 * Lanes::count, Lanes::odd(front, back));
    }
}

#else

struct Keys {
    uint64_t seed;
    explicit Keys(uint64_t seed) : seed(seed) {}
};

constexpr size_t blocks_at_once = 1;

COMPCOLL_HD void random_blocks(const Keys& keys, uint64_t rng_counter, uint64_t index, uint8_t* out) {
    const RandomBlock block(keys.seed, rng_counter, index);
    std::memcpy(out, block.words, sizeof(block.words));
}

#endif

constexpr size_t random_at_once = 8 * blocks_at_once;

// The source of random numbers for some values.
struct Draws {
    Keys keys;
    uint64_t rng_counter, position;

    // Store 16 bits for each of n values from the i-th on; n is rounded up to a multiple of random_at_once.
    void fill(size_t i, size_t n, uint16_t* out) const {
        for (size_t j = 0; j < n; j += random_at_once)
            random_blocks(keys, rng_counter, (position + i) / 8 + j / 8, reinterpret_cast<uint8_t*>(out + j));
    }
};

}  // namespace
}  // namespace compcoll
