// ZFP's wire on a CPU: consecutive bits.
#pragma once

#include "portable.h"

namespace compcoll {
namespace {  // each instruction set has its own copy

// Writes bits into words of 64 bits. Pending bits are written again with the next ones.
struct BitWriter {
    uint8_t* to;
    uint64_t pending = 0;
    int filled = 0;

    void append(uint64_t bits, int length) {  // 1 … 64 bits, zeros above
        const uint64_t word = pending | bits << filled;
        std::memcpy(to, &word, sizeof(word));
        filled += length;
        const bool full = filled >= 64;
        pending = full ? bits >> 1 >> (63 - (filled - length)) : word;
        filled -= full ? 64 : 0;
        to += full ? 8 : 0;
    }

    void finish() const {
        if (filled > 0) std::memcpy(to, &pending, sizeof(pending));
    }
};

}  // namespace
}  // namespace compcoll
