// The contract between a codec's arithmetic and the loops over a buffer: functions on one tile.
//
// A tile is a run of values that fits the first-level cache. Its length is a multiple of the codec's
// granularity, except the last one of a buffer, which may have any length. The wires of consecutive tiles
// follow each other without gaps. A function reads and writes no byte outside the n values and the
// wire_nbytes(n) bytes that it is given, whatever the bytes are, and assumes no alignment.
#pragma once

#include "portable.h"

namespace compcoll {

enum class Codec : int { cast = 0, zfp = 1, minmax = 2 };

// Element types of user buffers and of the cast codec's wire. Halves are computed on in float32.
enum class Storage : int { float16 = 0, bfloat16 = 1, float32 = 2, float64 = 3 };

constexpr size_t storage_size(Storage s) { return s == Storage::float64 ? 8 : s == Storage::float32 ? 4 : 2; }

// A codec's configuration:  cast: first = Storage of the wire;  zfp: first = maxbits, bits per block of 4;
// minmax: first = bits per value, second = values per block.
struct Config {
    int first;
    int second;
};

template <class T>
struct TileFunctions {
    void (*encode)(const T* values, size_t n, uint8_t* wire, Config config);
    void (*decode)(const uint8_t* wire, size_t n, T* values, Config config);  // values = D(wire)
    // values = base + D(wire); base is values or lies elsewhere
    void (*decode_add)(const uint8_t* wire, size_t n, const T* base, T* values, Config config);
};

struct Kernels {
    TileFunctions<float> f32;
    TileFunctions<double> f64;
};

// One set of functions for each codec and instruction set; all sets of a codec give the same bytes.
extern const Kernels cast_portable, zfp_portable, minmax_portable;
#if defined(COMPCOLL_X86)
extern const Kernels cast_avx2, zfp_avx2, minmax_avx2;          // AVX2 + F16C + BMI2 (x86-64-v3)
extern const Kernels cast_avx512, zfp_avx512, minmax_avx512;    // AVX-512 F/BW/CD/DQ/VL (x86-64-v4) + VBMI + GFNI
#endif

}  // namespace compcoll
