// Common parts of the loops of codecs whose blocks have a header and packed codes.
#pragma once

#include <type_traits>

#include "floats.h"
#include "packing.h"
#include "tile.h"
#include "unaligned.h"
#include "vectors.h"

namespace compcoll {
namespace {

constexpr size_t slice = 512;  // codes, one per byte, between arithmetic and packing; a multiple of 8

COMPCOLL_HD size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

// ---- packing: `bits` bytes hold eight codes ----

template <int bytes>
struct Word {  // the widest integer of at most `bytes` bytes: two of them, overlapping, cover 1 to 7 bytes exactly
    using type = uint32_t;
};
template <>
struct Word<1> { using type = uint8_t; };
template <>
struct Word<2> { using type = uint16_t; };
template <>
struct Word<3> { using type = uint16_t; };

template <int bytes>
COMPCOLL_HD void store_bytes(uint8_t* to, uint64_t value) {
    using Part = typename Word<bytes>::type;
    constexpr int rest = bytes - static_cast<int>(sizeof(Part));
    store(to, static_cast<Part>(value));
    if constexpr (rest > 0) store(to + rest, static_cast<Part>(value >> (8 * rest)));
}

template <int bytes>
COMPCOLL_HD uint64_t load_bytes(const uint8_t* from) {
    using Part = typename Word<bytes>::type;
    constexpr int rest = bytes - static_cast<int>(sizeof(Part));
    uint64_t value = load<Part>(from);
    if constexpr (rest > 0) value |= static_cast<uint64_t>(load<Part>(from + rest)) << (8 * rest);
    return value;
}

// n <= slice; `codes` is overwritten, and must be accessible up to a multiple of 8.
template <int bits>
void pack(uint8_t* __restrict codes, size_t n, uint8_t* __restrict wire) {
    const size_t groups = n / 8, rest = n % 8;
    if (rest) std::memset(codes + n, 0, 8 - rest);
    for (size_t g = 0; g < groups + (rest != 0); ++g) store(codes + 8 * g, packed(load<uint64_t>(codes + 8 * g), bits));
    for (size_t g = 0; g < groups; ++g) store_bytes<bits>(wire + bits * g, load<uint64_t>(codes + 8 * g));
    if (rest) std::memcpy(wire + bits * groups, codes + 8 * groups, (rest * bits + 7) / 8);
}

template <int bits>
void unpack(const uint8_t* __restrict wire, size_t n, uint8_t* __restrict codes) {
    const size_t groups = n / 8, rest = n % 8;
    for (size_t g = 0; g < groups; ++g) store(codes + 8 * g, load_bytes<bits>(wire + bits * g));
    if (rest) {
        std::memset(codes + 8 * groups, 0, 8);
        std::memcpy(codes + 8 * groups, wire + bits * groups, (rest * bits + 7) / 8);
    }
    for (size_t g = 0; g < groups + (rest != 0); ++g) store(codes + 8 * g, unpacked(load<uint64_t>(codes + 8 * g), bits));
}

struct Packing {
    void (*pack)(uint8_t* codes, size_t n, uint8_t* wire);
    void (*unpack)(const uint8_t* wire, size_t n, uint8_t* codes);
};

constexpr Packing packings[] = {{pack<1>, unpack<1>}, {pack<2>, unpack<2>}, {pack<3>, unpack<3>}, {pack<4>, unpack<4>},
                                {pack<5>, unpack<5>}, {pack<6>, unpack<6>}, {pack<7>, unpack<7>}};

// ---- fills ----

template <bool add, class T>
void fill(T value, size_t n, const T* base, T* values) {
    SAME_OR_APART for (size_t i = 0; i < n; ++i) put<add>(values + i, base + i, value);
}

constexpr size_t prefetched_nbytes = 32768;  // little of longer blocks would be left in the first-level cache

// The largest magnitude of n values, n >= 1. Comparing bits gives the same result in any order and on any machine: NaN is larger
// than Inf.
template <class T>
T largest_magnitude(const T* values, size_t n) {
    using Bits = typename FloatFormat<T>::Bits;
    using Signed = std::make_signed_t<Bits>;  // every vector unit can compare these
    Signed largest = 0;
    for (size_t i = 0; i < n; ++i) {
        const auto magnitude = static_cast<Signed>(load<Bits>(values + i) & (~Bits(0) >> 1));
        largest = magnitude > largest ? magnitude : largest;
    }
    return bits_as<T>(largest);
}

}  // namespace
}  // namespace compcoll
