// The szp codec's wire and arithmetic: values rounded to integer multiples of a step, as differences of neighbours.
//
// After cuSZp (Y. Huang et al., SC 2023) and hZCCL (J. Huang et al., SC 2024), with codes in the order of whole vectors. Wires of the
// same step are added as integers: a sum has no error but the rounding of each rank's values, whatever the order of additions.
//
// Wire of n values in b blocks of 512, the last of which may be shorter; little endian, no gaps:
//   float64     the step
//   int32 [b]   the first integer of each block; 0 in raw blocks
//   uint8 [b]   the width of each block: bits of a code, 0 to 32, or szp_raw; then zeros up to a multiple of 4 bytes
//   the blocks  raw:    the values
//               others: a code for each value, its integer minus the one before (for the first value 0) in two's complement. Lane l of
//                       16 holds the codes of values l, l + 16, l + 32, … one after the other from the lowest bit on, in 32-bit
//                       words; the words of the 16 lanes alternate.
// A block is raw if it holds NaN or Inf on some rank, or values too large for integers whose sums have 32 bits.
#pragma once

#include "cast.h"
#include "floats.h"

namespace compcoll {

constexpr int szp_lanes = 16, szp_rows = 32, szp_block = szp_lanes * szp_rows;
constexpr int szp_widest = 32, szp_raw = 255;
constexpr int szp_header_nbytes = 8, szp_word_nbytes = 4, szp_row_nbytes = szp_lanes * szp_word_nbytes;

// The bytes before the blocks.
COMPCOLL_HD int64_t szp_front_nbytes(int64_t blocks) { return szp_header_nbytes + 4 * blocks + (blocks + 3) / 4 * 4; }

// The bytes of a block of m values, each of value_size bytes.
COMPCOLL_HD int szp_block_nbytes(int width, int m, int value_size) {
    if (width == szp_raw) return m * value_size;
    return ((m + szp_lanes - 1) / szp_lanes * width + 31) / 32 * szp_row_nbytes;
}

// The most bytes of a block of m values.
COMPCOLL_HD int szp_most_block_nbytes(int m, int value_size) {
    const int raw = szp_block_nbytes(szp_raw, m, value_size), packed = szp_block_nbytes(szp_widest, m, value_size);
    return raw > packed ? raw : packed;
}

template <class T>
COMPCOLL_HD T szp_value(double sum) {
    if constexpr (sizeof(T) == 8) return sum;
    else return float_of(sum);
}

// A value of a raw block. All processors write the same NaN.
template <class T>
COMPCOLL_HD T szp_raw_value(double sum) {
    return sum == sum ? szp_value<T>(sum) : quiet_nan<T>();
}

// An integer multiple of a step: rounded to nearest, ties to even. The sum's last bit has the value 1, so its lower half is the integer.
COMPCOLL_HD uint32_t szp_integer(double value, double steps_per_unit) {
    return static_cast<uint32_t>(bits_as<uint64_t>(value * steps_per_unit + 0x1.8p52));
}

}  // namespace compcoll
