// A counter-based random number generator: Philox4x32-10, four 32-bit words for each counter and key.
//
// J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
//
// Stochastic rounding takes 16 bits per value. Value i of a buffer has half word i mod 8 (lower half of the first word first) of
// a block. The block's key is the codec's seed. Its counter is ⌊i/8⌋ in the lower 64 bits and the rng counter in the upper ones.
// So the bits depend neither on the machine nor on how the buffer is split, and a GPU thread computes them for eight values at once.
#pragma once

#include "portable.h"

namespace compcoll {

struct Philox {
    static constexpr int rounds = 10;
    static constexpr uint32_t first_factor = 0xd2511f53, second_factor = 0xcd9e8d57;
    static constexpr uint32_t first_step = 0x9e3779b9, second_step = 0xbb67ae85;  // added to the key each round
};

struct RandomBlock {
    uint32_t words[4];

    COMPCOLL_HD RandomBlock(uint64_t seed, uint64_t rng_counter, uint64_t index)
        : words{static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(rng_counter),
                static_cast<uint32_t>(rng_counter >> 32)} {
        uint32_t first_key = static_cast<uint32_t>(seed), second_key = static_cast<uint32_t>(seed >> 32);
        for (int round = 0; round < Philox::rounds; ++round) {
            const uint64_t first = static_cast<uint64_t>(words[0]) * Philox::first_factor;
            const uint64_t second = static_cast<uint64_t>(words[2]) * Philox::second_factor;
            words[0] = static_cast<uint32_t>(second >> 32) ^ words[1] ^ first_key;
            words[1] = static_cast<uint32_t>(second);
            words[2] = static_cast<uint32_t>(first >> 32) ^ words[3] ^ second_key;
            words[3] = static_cast<uint32_t>(first);
            first_key += Philox::first_step;
            second_key += Philox::second_step;
        }
    }
};

}  // namespace compcoll
