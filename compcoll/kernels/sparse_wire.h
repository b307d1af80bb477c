// Sparse wires: which elements of a buffer are sent, and what they are. Also the exact choice among few candidates.
//
// A wire is a header of 32 bytes, the indices, and the values, without gaps, little endian:
//
//   header   byte 0: index format; byte 1: value format; byte 2: bytes of a value, 4 or 8; byte 3: 0;
//            int32 biased exponent of the power code; float64 step; uint64 n, elements of the buffer; uint64 count, sent ones
//   indices  pairs:  uint32 each, ascending
//            packed: uint32 each, index in the lower 28 bits and power code in the upper 4; no values follow
//            runs:   uint16 each, how many elements lie between this one and the one before; 0xffff: 65535 elements and
//                    no sent one
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

// What is sent of a buffer of n elements: indices ascending and below n, and as many values.
template <class T>
struct Chosen {
    const T* values;
    const uint32_t* indices;
    size_t count;
    uint64_t n;
};

// Bytes of the wire with these formats, whatever the values are. Where a power code or a packed index cannot hold what there
// is, it is not asked.
template <class T>
size_t sparse_nbytes(const Chosen<T>& chosen, IndexFormat indices, ValueFormat values);

// `step` for signs, `top` for power codes (then every chosen value has one). Writes sparse_nbytes bytes.
template <class T>
void write_sparse(
    const Chosen<T>& chosen, IndexFormat indices, ValueFormat values, double step, int top, uint8_t* wire);

// What a wire says of itself; null, or what is wrong with it.
struct SparseHeader {
    IndexFormat indices;
    ValueFormat values;
    size_t count;
    double step;
    int top;
};
template <class T>
const char* read_header(const uint8_t* wire, size_t nbytes, uint64_t n, SparseHeader& header);

// The elements of a wire whose header was read; null, or what is wrong with it. Nothing is read beyond nbytes, and all
// indices are ascending and below n.
template <class T>
const char* read_sparse(
    const uint8_t* wire, size_t nbytes, uint64_t n, const SparseHeader& header, uint32_t* indices, T* values);

// The magnitude of which k are at least as large; 0 < k <= n.
template <class T>
T kth_largest(const T* values, size_t n, size_t k);

// Positions, ascending, of the k largest magnitudes, the first of equal ones, without zeros; of all that are not finite,
// even if there are more. `positions` has room for n. Returns how many.
template <class T>
size_t largest(const T* values, size_t n, size_t k, uint32_t* positions);

// A stratified sample: runs of 16 neighbours, m in all, a multiple of 16 and at most n. The same for the same n and m.
template <class T>
void sample(const T* values, size_t n, T* sampled, size_t m);

}  // namespace compcoll
