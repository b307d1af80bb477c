// Sparse wires: the indices and values of the elements sent. Also the exact selection among few candidates.
//
// A wire is a header of 32 bytes, the indices, and the values, without gaps, little endian:
//
//   header   byte 0: index format; byte 1: value format; byte 2: bytes of a value, 4 or 8; byte 3: 0;
//            int32 biased exponent of the power code; float64 step; uint64 n, elements of the buffer; uint64 count, sent ones
//   indices  pairs:  uint32 each, ascending
//            packed: uint32 each, index in the lower 28 bits and power code in the upper 4; no values follow
//            runs:   uint16 each, the number of elements between this one and the previous one; 0xffff: 65535 elements,
//                    none of them sent
//            mask:   one bit for each of the n elements, the lowest bit first
//   values   full:   float32 or float64
//            sign:   one bit each, set for -step, else +step
//            power:  4 bits each, the lower half of a byte first: see sparse.h
#pragma once

#include "portable.h"

namespace compcoll {

enum class IndexFormat : uint8_t { pairs = 0, packed = 1, runs = 2, mask = 3 };
enum class ValueFormat : uint8_t { full = 0, sign = 1, power = 2 };

constexpr size_t sparse_header_nbytes = 32;
constexpr uint64_t most_sparse_elements = uint64_t(1) << 32, most_packed_elements = uint64_t(1) << 28;

// The elements sent of a buffer of n elements: ascending indices below n, and as many values.
template <class T>
struct Chosen {
    const T* values;
    const uint32_t* indices;
    size_t count;
    uint64_t n;
};

// Return the size in bytes of the wire with these formats, which does not depend on the values. It does not check whether power
// codes or packed indices can represent the elements.
template <class T>
size_t sparse_nbytes(const Chosen<T>& chosen, IndexFormat indices, ValueFormat values);

// Write sparse_nbytes bytes. `step` is for signs, `top` for power codes (then every chosen value must have one).
template <class T>
void write_sparse(
    const Chosen<T>& chosen, IndexFormat indices, ValueFormat values, double step, int top, uint8_t* wire);

// The header of a wire. read_header returns null, or what is wrong with the wire.
struct SparseHeader {
    IndexFormat indices;
    ValueFormat values;
    size_t count;
    double step;
    int top;
};
template <class T>
const char* read_header(const uint8_t* wire, size_t nbytes, uint64_t n, SparseHeader& header);

// Read the elements of a wire whose header was read. Return null, or what is wrong with the wire. It reads nothing beyond nbytes,
// and ensures that all indices are ascending and below n.
template <class T>
const char* read_sparse(
    const uint8_t* wire, size_t nbytes, uint64_t n, const SparseHeader& header, uint32_t* indices, T* values);

// Return the k-th largest magnitude; 0 < k <= n.
template <class T>
T kth_largest(const T* values, size_t n, size_t k);

// Write the ascending positions of the k largest magnitudes, without zeros; of equal ones, the first. All values that are not
// finite are included, even more than k. `positions` has room for n. Return the number of positions.
template <class T>
size_t largest(const T* values, size_t n, size_t k, uint32_t* positions);

// Take a stratified sample: runs of 16 adjacent values, m values in all; m is a multiple of 16 and at most n. The positions depend
// on n and m only.
template <class T>
void sample(const T* values, size_t n, T* sampled, size_t m);

}  // namespace compcoll
