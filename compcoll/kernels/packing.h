// Codes of 1 to 8 bits, eight at a time, first code in the lowest bits.
#pragma once

#include "portable.h"

namespace compcoll {

// Pack eight codes, one per byte, into 8·bits adjacent bits: first into pairs, then into fours, then all eight.
COMPCOLL_HD uint64_t packed(uint64_t codes, int bits) {
    const int gap = 8 - bits;
    codes = (codes & 0x00ff00ff00ff00ffu) | ((codes & 0xff00ff00ff00ff00u) >> gap);
    codes = (codes & 0x0000ffff0000ffffu) | ((codes & 0xffff0000ffff0000u) >> (2 * gap));
    return (codes & 0x00000000ffffffffu) | ((codes & 0xffffffff00000000u) >> (4 * gap));
}

// The inverse of packed; it ignores bits above the lowest 8·bits.
COMPCOLL_HD uint64_t unpacked(uint64_t word, int bits) {
    const int gap = 8 - bits;
    const uint64_t one = (uint64_t(1) << bits) - 1, two = (uint64_t(1) << (2 * bits)) - 1, four = (uint64_t(1) << (4 * bits)) - 1;
    const uint64_t every_second = one * 0x0001000100010001u, every_fourth = two * 0x0000000100000001u;
    word = (word & four) | ((word & (four << (4 * bits))) << (4 * gap));
    word = (word & every_fourth) | ((word & (every_fourth << (2 * bits))) << (2 * gap));
    return (word & every_second) | ((word & (every_second << bits)) << gap);
}

}  // namespace compcoll
