// The codecs that have kernels, one line each; a line makes kernels for the CPU and for CUDA. CMake and Python also read the names
// here. A codec for the CPU alone has no line: it derives from compcoll.NumpyCodec.
//
// `Codec.coder` in Python asks for a kernel by its name and three numbers, which Config (tile.h) holds:
//   first     what the constructor of the codec's struct gets; it selects the code, such as 4 exponent bits for fp8's e4m3
//   second    the number of values in a block, such as int8's `block`; 0 for cast and zfp
//   variant   how to encode, where decoding is the same: the norm and the rounding of qsgd; 0 for all others
//
// The line of a codec whose blocks have a header and packed codes gives:  the name;  the struct;  the smallest and the largest
// `first`;  the largest `variant`;  the bytes of a header;  the bits of a code. The last two are expressions, which may contain `first`,
// `block` and `value_size`, the bytes of a value in computations: 4 or 8.
#pragma once

#include "fp8.h"
#include "int8.h"
#include "nvfp4.h"

// The header of a block follows from its largest magnitude; scaled_tiles.h has their loops.
//   fp8: first = exponent bits;  int8: first = bits of a code
#define COMPCOLL_EACH_SCALED_CODEC(X)   \
    X(fp8, FP8, 4, 5, 0, 2, 8)          \
    X(int8, Int8, 8, 8, 0, value_size, 8)

// With their own loops.
//   minmax, qsgd: first = bits of a code;  onebit: first = values that a block's signs stand for
//   mx: first = element type, and 8 more with rotation;  nvfp4: first = 1 with rotation
#define COMPCOLL_EACH_BLOCK_CODEC(X)                  \
    X(minmax, MinMax, 1, 8, 0, 2 * value_size, first) \
    X(qsgd, QSGD, 1, 8, 3, value_size, first)         \
    X(onebit, OneBit, 1, 2, 0, first * value_size, 1) \
    X(mx, MX, 0, 13, 0, 1, mx_bits(first))            \
    X(nvfp4, NVFP4, 0, 1, 0, 4 + block / 16, 4)       \
    COMPCOLL_EACH_SCALED_CODEC(X)

// Without headers.
//   cast: first = significant bits of the wire's type;  zfp: first = bits of a block of 4
#define COMPCOLL_EACH_CODEC(X) \
    X(cast, Cast)              \
    X(zfp, ZFP)                \
    COMPCOLL_EACH_BLOCK_CODEC(X)

namespace compcoll {

#define COMPCOLL_NAMED(codec, ...) codec,
enum class Codec : int { COMPCOLL_EACH_CODEC(COMPCOLL_NAMED) };
#undef COMPCOLL_NAMED

#define COMPCOLL_NAMED(codec, ...) #codec,
constexpr const char* codec_names[] = {COMPCOLL_EACH_CODEC(COMPCOLL_NAMED)};
#undef COMPCOLL_NAMED

constexpr int codec_count = sizeof(codec_names) / sizeof(*codec_names);

struct Range {
    int least, largest;
};

// The range of `first`. For casts, whose `first` identifies a type, not every number in it is valid.
COMPCOLL_HD constexpr Range range_of_first(Codec codec, bool wide) {
    switch (codec) {
        case Codec::cast: return {8, wide ? 53 : 24};
        case Codec::zfp: return {wide ? 12 : 9, wide ? 256 : 128};
#define COMPCOLL_RANGE(codec, name, least, largest, ...) case Codec::codec: return {least, largest};
        COMPCOLL_EACH_BLOCK_CODEC(COMPCOLL_RANGE)
#undef COMPCOLL_RANGE
    }
    return {0, 0};
}

// The number of values in a block of a codec that has no option for it; 0 for the others.
COMPCOLL_HD constexpr int fixed_block(Codec codec) { return codec == Codec::mx ? mx_block : codec == Codec::nvfp4 ? nvfp4_block : 0; }

COMPCOLL_HD constexpr int largest_variant(Codec codec) {
    switch (codec) {
#define COMPCOLL_LARGEST_VARIANT(codec, name, least, largest, variant, ...) case Codec::codec: return variant;
        COMPCOLL_EACH_BLOCK_CODEC(COMPCOLL_LARGEST_VARIANT)
#undef COMPCOLL_LARGEST_VARIANT
        default: return 0;
    }
}

}  // namespace compcoll
