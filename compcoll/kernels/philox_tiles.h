// Philox on vectors: the same numbers, with one block per lane.
#pragma once

#include "blocks.h"
#include "philox.h"

namespace compcoll {
namespace {

// 64-bit lanes whose lower halves are multiplied; the upper halves are ignored. `even` and `odd` interleave the even and odd lanes.
using Lanes = VectorOf<double>::Bits;
constexpr size_t lane_count = lanes<double>;

#if defined(__AVX512F__)
COMPCOLL_HD Lanes product(Lanes a, Lanes b) { return bits_as<Lanes>(_mm512_mul_epu32(bits_as<__m512i>(a), bits_as<__m512i>(b))); }
COMPCOLL_HD Lanes even(Lanes a, Lanes b) { return bits_as<Lanes>(_mm512_unpacklo_epi64(bits_as<__m512i>(a), bits_as<__m512i>(b))); }
COMPCOLL_HD Lanes odd(Lanes a, Lanes b) { return bits_as<Lanes>(_mm512_unpackhi_epi64(bits_as<__m512i>(a), bits_as<__m512i>(b))); }
#elif defined(__AVX2__)
COMPCOLL_HD Lanes product(Lanes a, Lanes b) { return bits_as<Lanes>(_mm256_mul_epu32(bits_as<__m256i>(a), bits_as<__m256i>(b))); }
COMPCOLL_HD Lanes even(Lanes a, Lanes b) { return bits_as<Lanes>(_mm256_unpacklo_epi64(bits_as<__m256i>(a), bits_as<__m256i>(b))); }
COMPCOLL_HD Lanes odd(Lanes a, Lanes b) { return bits_as<Lanes>(_mm256_unpackhi_epi64(bits_as<__m256i>(a), bits_as<__m256i>(b))); }
#else
#if defined(__SSE2__)
COMPCOLL_HD Lanes product(Lanes a, Lanes b) { return bits_as<Lanes>(_mm_mul_epu32(bits_as<__m128i>(a), bits_as<__m128i>(b))); }
#else
COMPCOLL_HD Lanes product(Lanes a, Lanes b) { return (a & 0xffffffff) * (b & 0xffffffff); }
#endif
COMPCOLL_HD Lanes even(Lanes a, Lanes b) { return Lanes{a[0], b[0]}; }
COMPCOLL_HD Lanes odd(Lanes a, Lanes b) { return Lanes{a[1], b[1]}; }
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

constexpr size_t blocks_at_once = 2 * lane_count;  // two vectors hide each other's latency

// Store blocks in order. The lanes are numbered so that one interleaving yields this order.
COMPCOLL_HD void random_blocks(const Keys& keys, uint64_t rng_counter, uint64_t index, uint8_t* out) {
    const Lanes first_factor = Lanes() + Philox::first_factor, second_factor = Lanes() + Philox::second_factor;
    Lanes counted = {}, a[2], b[2], c[2], d[2];
    for (size_t lane = 0; lane < lane_count; ++lane) counted[lane] = lane / 2 + lane % 2 * lane_count / 2;
    for (size_t v = 0; v < 2; ++v) {
        a[v] = counted + (index + v * lane_count);
        b[v] = a[v] >> 32;
        c[v] = Lanes() + rng_counter;
        d[v] = c[v] >> 32;
    }
#pragma GCC unroll 10
    for (int round = 0; round < Philox::rounds; ++round) {
        for (size_t v = 0; v < 2; ++v) {
            const Lanes first = product(a[v], first_factor), second = product(c[v], second_factor);
            a[v] = second >> 32 ^ b[v] ^ keys.first[round];
            b[v] = second;
            c[v] = first >> 32 ^ d[v] ^ keys.second[round];
            d[v] = first;
        }
    }
    for (size_t v = 0; v < 2; ++v) {
        const Lanes front = (a[v] & 0xffffffff) | b[v] << 32, back = (c[v] & 0xffffffff) | d[v] << 32;
        store(out + (2 * v) * 8 * lane_count, even(front, back));
        store(out + (2 * v + 1) * 8 * lane_count, odd(front, back));
    }
}

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
