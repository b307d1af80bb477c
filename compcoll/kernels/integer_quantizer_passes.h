// The interface of passes over a whole buffer that convert values to integers that any allreduce can sum, and back
// (integer_quantizer.h). Blocks have `block` values, a multiple of 8; the last block may be shorter. All instruction sets give the
// same results.
#pragma once

#include "floats.h"
#include "per_type.h"

namespace compcoll {

// Marks of a block whose votes are gathered: whether some rank has zeros, or values that are not finite, in it.
enum : uint8_t { some_zeros = 1, something_not_finite = 2 };

template <class T>
struct IntegerQuantizerFunctions {
    using Bits = BitsOf<T>;
    // Store the bits of each block's largest magnitude; those of NaN are larger than those of Inf.
    void (*survey)(const T* values, size_t n, size_t block, Bits* largest);
    // Store integers of `nbytes` bytes, and in `lost`, unless null, what the rounding loses.
    void (*to_levels)(
        const T* values, size_t n, size_t block, const Bits* largest, int32_t levels, int nbytes, uint8_t* numbers, T* lost);
    void (*from_levels)(
        const uint8_t* numbers, int nbytes, size_t n, size_t block, const Bits* largest, int32_t levels, T* values);
    // Store fields of `width` bits, the first in the lowest bits.
    void (*to_votes)(const T* values, size_t n, int width, uint8_t* numbers);
    void (*from_votes)(
        const uint8_t* numbers, int width, uint32_t ranks, size_t n, size_t block, const Bits* largest, T* values);
    // Decode votes from one row of bits per rank: at most 127 rows, `stride` bytes apart. A row has the sign bits of all values;
    // then, for blocks with the mark `some_zeros`, a bit for each value that is not zero. The first value is in the lowest bit.
    void (*from_bits)(
        const uint8_t* rows, size_t ranks, size_t stride, size_t n, size_t block, const uint8_t* marks, T* values);
};

using IntegerQuantizerPasses = PerType<IntegerQuantizerFunctions>;

extern const IntegerQuantizerPasses integer_quantizer_portable, integer_quantizer_avx2, integer_quantizer_avx512;

}  // namespace compcoll
