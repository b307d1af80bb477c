// The contract of the passes over a whole buffer that turn values into numbers that any allreduce adds, and back (summands.h).
// Blocks are of `block` values, a multiple of 8; the last may be shorter. All instruction sets give the same results.
#pragma once

#include "floats.h"

namespace compcoll {

// Of a block whose votes are gathered: what some rank has in it.
enum : uint8_t { some_zeros = 1, something_not_finite = 2 };

template <class T>
struct IntegerQuantizerFunctions {
    using Bits = typename FloatFormat<T>::Bits;
    // The bits of each block's largest magnitude: those of NaN are larger than those of Inf.
    void (*survey)(const T* values, size_t n, size_t block, Bits* largest);
    // Integers of `nbytes` bytes; `lost`, unless null: what they lose.
    void (*to_levels)(
        const T* values, size_t n, size_t block, const Bits* largest, int32_t levels, int nbytes, uint8_t* numbers, T* lost);
    void (*from_levels)(
        const uint8_t* numbers, int nbytes, size_t n, size_t block, const Bits* largest, int32_t levels, T* values);
    // Fields of `width` bits, the first in the lowest bits.
    void (*to_votes)(const T* values, size_t n, int width, uint8_t* numbers);
    void (*from_votes)(
        const uint8_t* numbers, int width, uint32_t ranks, size_t n, size_t block, const Bits* largest, T* values);
    // The same from a row of bits of each rank, at most 127 and so many bytes apart: which values are negative, and then, of blocks
    // with the mark `some_zeros`, which are not zero. The first in the lowest bit.
    void (*from_bits)(
        const uint8_t* rows, size_t ranks, size_t stride, size_t n, size_t block, const uint8_t* marks, T* values);
};

struct IntegerQuantizerPasses {
    IntegerQuantizerFunctions<float> f32;
    IntegerQuantizerFunctions<double> f64;
};

extern const IntegerQuantizerPasses integer_quantizer_portable;
#if defined(COMPCOLL_X86)
extern const IntegerQuantizerPasses integer_quantizer_avx2, integer_quantizer_avx512;
#endif

}  // namespace compcoll
