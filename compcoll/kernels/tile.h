// The contract between a codec's arithmetic and the loops over a buffer: functions on one tile.
//
// A tile is a run of values that fits the first-level cache. Its length is a multiple of the codec's
// granularity, except the last one of a buffer, which may have any length. The wires of consecutive tiles
// follow each other without gaps. A function reads and writes no byte outside the n values and the
// wire_nbytes(n) bytes that it is given, whatever the bytes are, and assumes no alignment.
#pragma once

#include "portable.h"

namespace compcoll {

enum class Codec : int { cast = 0, zfp = 1, minmax = 2, qsgd = 3, onebit = 4, fp8 = 5 };
constexpr int codec_count = 6;

// Element types of user buffers and of the cast codec's wire. Halves are computed on in float32.
enum class Storage : int { float16 = 0, bfloat16 = 1, float32 = 2, float64 = 3 };

constexpr size_t storage_size(Storage s) { return s == Storage::float64 ? 8 : s == Storage::float32 ? 4 : 2; }

// A codec's configuration:  cast: first = Storage of the wire;  zfp: first = maxbits, bits per block of 4;
// minmax: first = bits per value, second = values per block;  qsgd: likewise, and variant, seed;  onebit: first = values that
// a block's signs stand for, second = values per block;  fp8: first = exponent bits, second = values per block.
struct Config {
    int first = 0;
    int second = 0;
    int variant = 0;
    uint64_t seed = 0;
    // Of one encoding, for codecs that round at random: its number, and where in the whole buffer the tile begins.
    uint64_t draw = 0;
    uint64_t position = 0;
};

template <class T>
struct TileFunctions {
    void (*encode)(const T* values, size_t n, uint8_t* wire, Config config);
    void (*decode)(const uint8_t* wire, size_t n, T* values, Config config);  // values = D(wire)
    // values = base + D(wire); base is values or lies elsewhere
    void (*decode_add)(const uint8_t* wire, size_t n, const T* base, T* values, Config config);
    // encode, and decoded = D(wire), for configurations whose `first` is at most `knows_up_to`: others take as long as both.
    // `decoded` is values or lies elsewhere.
    void (*encode_decoded)(const T* values, size_t n, uint8_t* wire, T* decoded, Config config) = nullptr;
    int knows_up_to = -1;
};

struct Kernels {
    TileFunctions<float> f32;
    TileFunctions<double> f64;
};

// What surrounds a codec: `sums` may be `a` or `b`.
template <class T>
struct SumFunctions {
    void (*multiply)(T* values, size_t n, T factor);
    void (*add)(const T* a, const T* b, size_t n, T* sums);
    // kept, which may be wanted, = (wanted - got) · factor, or without `feed` that more than it was; nothing where that is
    // not finite
    void (*keep_loss)(const T* wanted, const T* got, size_t n, T factor, bool feed, T* kept);
};

struct Sums {
    SumFunctions<float> f32;
    SumFunctions<double> f64;
};

// One set of functions for each codec and instruction set; all sets of a codec give the same bytes.
extern const Kernels cast_portable, zfp_portable, minmax_portable, qsgd_portable, onebit_portable, fp8_portable;
extern const Sums sums_portable;
#if defined(COMPCOLL_X86)
// AVX2 + F16C + BMI2 (x86-64-v3)
extern const Kernels cast_avx2, zfp_avx2, minmax_avx2, qsgd_avx2, onebit_avx2, fp8_avx2;
extern const Sums sums_avx2;
// AVX-512 F/BW/CD/DQ/VL (x86-64-v4) + VBMI + GFNI
extern const Kernels cast_avx512, zfp_avx512, minmax_avx512, qsgd_avx512, onebit_avx512, fp8_avx512;
extern const Sums sums_avx512;
#endif

}  // namespace compcoll
