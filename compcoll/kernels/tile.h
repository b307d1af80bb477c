// The interface between a codec's arithmetic and the loops over a buffer: functions on one tile.
//
// A tile is a run of values that fits the first-level cache. Its length is a multiple of the codec's
// granularity, except for the last tile of a buffer, which may have any length. The wires of consecutive tiles
// follow each other without gaps. A function accesses no byte outside the n values and the
// wire_nbytes(n) bytes that it is given, whatever these contain, and assumes no alignment.
#pragma once

#include "codecs.h"
#include "per_type.h"
#include "portable.h"

namespace compcoll {

// Element types of user buffers and of the cast codec's wire, by their significant bits. Computations on halves use float32.
enum class Storage : int { float16 = 11, bfloat16 = 8, float32 = 24, float64 = 53 };

constexpr bool is_storage(int bits) { return bits == 11 || bits == 8 || bits == 24 || bits == 53; }
constexpr size_t storage_size(Storage s) { return s == Storage::float64 ? 8 : s == Storage::float32 ? 4 : 2; }

// A codec's configuration; codecs.h says what each codec takes.
struct Config {
    int first = 0;
    int second = 0;
    int variant = 0;
    uint64_t seed = 0;
    // For codecs that round at random: the rng counter of an encoding, and the tile's index in the whole buffer.
    uint64_t rng_counter = 0;
    uint64_t position = 0;
};

template <class T>
struct TileFunctions {
    void (*encode)(const T* values, size_t n, uint8_t* wire, Config config);
    // values = D(wire), or base + D(wire); base equals values or does not overlap it
    using Decode = void(const uint8_t* wire, size_t n, const T* base, T* values, Config config);
    Decode* decode;
    Decode* decode_add;
    // encode, and decoded = D(wire). Only for configurations with a `first` of at most `knows_up_to`: elsewhere it would take as
    // long as two calls. `decoded` equals values or does not overlap it.
    void (*encode_decoded)(const T* values, size_t n, uint8_t* wire, T* decoded, Config config) = nullptr;
    int knows_up_to = -1;
};

using Kernels = PerType<TileFunctions>;

// Sums around a codec: `sums` may be `a` or `b`.
template <class T>
struct SumFunctions {
    void (*multiply)(T* values, size_t n, T factor);
    void (*add)(const T* a, const T* b, size_t n, T* sums);
    // Store (wanted - got) · factor in kept, which may be wanted; without `feed`, add it to kept. Results that are not finite count
    // as 0.
    void (*keep_loss)(const T* wanted, const T* got, size_t n, T factor, bool feed, T* kept);
};

using Sums = PerType<SumFunctions>;

// One set of functions for each codec and instruction set; all sets of a codec produce the same bytes. On x86-64, avx2 stands for
// AVX2 + F16C + BMI2 (x86-64-v3), avx512 for AVX-512 F/BW/CD/DQ/VL (x86-64-v4) + VBMI + GFNI; elsewhere both do not exist.
#define COMPCOLL_DECLARED(codec, ...) extern const Kernels codec##_portable, codec##_avx2, codec##_avx512;
COMPCOLL_EACH_CODEC(COMPCOLL_DECLARED)
#undef COMPCOLL_DECLARED
extern const Sums sums_portable, sums_avx2, sums_avx512;

}  // namespace compcoll
