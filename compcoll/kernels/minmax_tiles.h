// The minmax codec's loops, written for the compiler's vectorizer. Each minmax_*.cpp compiles them for its instruction
// set: everything here is in an unnamed namespace, so that the linker never takes one set's function for another's.
#pragma once

#include "minmax.h"
#include "tile.h"
#include "unaligned.h"

namespace compcoll {
namespace {

constexpr size_t slice = 512;  // codes held one a byte between the arithmetic and the packing; a multiple of 8

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

// n <= slice codes; `codes` is overwritten, and is readable and writable up to a multiple of 8.
template <int bits>
void pack(uint8_t* __restrict codes, size_t n, uint8_t* __restrict wire) {
    const size_t groups = n / 8, rest = n % 8;
    if (rest) std::memset(codes + n, 0, 8 - rest);
    for (size_t g = 0; g < groups + (rest != 0); ++g) store(codes + 8 * g, packed<bits>(load<uint64_t>(codes + 8 * g)));
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
    for (size_t g = 0; g < groups + (rest != 0); ++g) store(codes + 8 * g, unpacked<bits>(load<uint64_t>(codes + 8 * g)));
}

struct Packing {
    void (*pack)(uint8_t* codes, size_t n, uint8_t* wire);
    void (*unpack)(const uint8_t* wire, size_t n, uint8_t* codes);
};

constexpr Packing packings[] = {{pack<1>, unpack<1>}, {pack<2>, unpack<2>}, {pack<3>, unpack<3>}, {pack<4>, unpack<4>},
                                {pack<5>, unpack<5>}, {pack<6>, unpack<6>}, {pack<7>, unpack<7>}};

// ---- one block ----

#if defined(__AVX512F__)
constexpr size_t vector_nbytes = 64;
#elif defined(__AVX__)
constexpr size_t vector_nbytes = 32;
#else
constexpr size_t vector_nbytes = 16;
#endif

template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
    typedef float Values __attribute__((vector_size(vector_nbytes)));
    typedef uint32_t Bits __attribute__((vector_size(vector_nbytes)));
};
template <>
struct VectorOf<double> {
    typedef double Values __attribute__((vector_size(vector_nbytes)));
    typedef uint64_t Bits __attribute__((vector_size(vector_nbytes)));
};

// Smallest and largest of some values, and whether all are finite. A Value is a T or a vector of them.
template <class Value, class Bits>
struct Extremes {
    Value smallest, largest;
    Bits not_finite;  // not 0 once a value was NaN or Inf

    COMPCOLL_HD explicit Extremes(Value x) : smallest(x), largest(x), not_finite(bits_as<Bits>(x - x)) {}

    COMPCOLL_HD void take(Value x) { merge(Extremes(x)); }

    COMPCOLL_HD void merge(const Extremes& other) {  // comparisons and selections in the order of minps and maxps
        smallest = other.smallest < smallest ? other.smallest : smallest;
        largest = other.largest > largest ? other.largest : largest;
        not_finite |= other.not_finite;
    }
};

template <class T>
Bounds<T> bounds_of(const T* values, size_t n) {
    using ScalarBits = typename MinMaxLimits<T>::Bits;
    using Values = typename VectorOf<T>::Values;
    using InLanes = Extremes<Values, typename VectorOf<T>::Bits>;
    constexpr size_t lanes = sizeof(Values) / sizeof(T), step = 4 * lanes;  // four chains hide the latency

    Extremes<T, ScalarBits> all(load<T>(values));
    size_t i = 0;
    if (n >= step) {
        const auto at = [values](size_t index) { return load<Values>(values + index); };
        InLanes a(at(0)), b(at(lanes)), c(at(2 * lanes)), d(at(3 * lanes));
        for (i = step; i + step <= n; i += step) {
            a.take(at(i));
            b.take(at(i + lanes));
            c.take(at(i + 2 * lanes));
            d.take(at(i + 3 * lanes));
        }
        a.merge(b);
        c.merge(d);
        a.merge(c);
        for (size_t lane = 0; lane < lanes; ++lane) {
            all.take(a.smallest[lane]);
            all.take(a.largest[lane]);
            all.not_finite |= a.not_finite[lane];
        }
    }
    for (; i < n; ++i) all.take(load<T>(values + i));
    return bounds_on_wire(all.smallest, all.largest, all.not_finite == 0);
}

template <class T, bool huge>
void quantize(const T* __restrict values, size_t n, Quantizer<T, huge> quantizer, uint8_t* __restrict codes) {
    for (size_t i = 0; i < n; ++i) codes[i] = quantizer.code(load<T>(values + i));
}

template <bool add, class T, bool huge>
void dequantize(
    const uint8_t* __restrict codes, size_t n, Dequantizer<T, huge> dequantizer, const T* base, T* values) {
    SAME_OR_APART for (size_t i = 0; i < n; ++i) put<add>(values + i, base + i, dequantizer.value(codes[i]));
}

template <bool add, class T>
void fill(T value, size_t n, const T* base, T* values) {
    SAME_OR_APART for (size_t i = 0; i < n; ++i) put<add>(values + i, base + i, value);
}

constexpr size_t prefetched_nbytes = 32768;  // of longer blocks little would be left in the first-level cache

// Has memory sent while the processor computes on other values. Nothing need lie there: prefetching cannot fault.
template <class T>
COMPCOLL_HD void prefetch(const T* values, size_t ahead, size_t n) {
    const auto begin = reinterpret_cast<uintptr_t>(values) + ahead * sizeof(T);
    for (size_t i = 0; i < n * sizeof(T); i += 64) __builtin_prefetch(reinterpret_cast<const void*>(begin + i));
}

template <class T, bool huge>
void encode_codes(const T* values, size_t n, Bounds<T> bounds, int bits, uint8_t* wire) {
    const Quantizer<T, huge> quantizer(bounds, (1 << bits) - 1);
    alignas(64) uint8_t packing_codes[slice];
    for (size_t i = 0; i < n; i += slice) {
        const size_t m = smaller(slice, n - i);
        uint8_t* codes = bits == 8 ? wire + i : packing_codes;
        if (n * sizeof(T) <= prefetched_nbytes) prefetch(values + i, n, m);  // the next block
        quantize(values + i, m, quantizer, codes);
        if (bits != 8) packings[bits - 1].pack(codes, m, wire + i / 8 * static_cast<size_t>(bits));
    }
}

template <bool add, class T, bool huge>
void decode_codes(const uint8_t* wire, size_t n, Bounds<T> bounds, int bits, const T* base, T* values) {
    const Dequantizer<T, huge> dequantizer(bounds, (1 << bits) - 1);
    if (bits == 8) return dequantize<add>(wire, n, dequantizer, base, values);
    alignas(64) uint8_t codes[slice];
    for (size_t i = 0; i < n; i += slice) {
        const size_t m = smaller(slice, n - i);
        packings[bits - 1].unpack(wire + i / 8 * static_cast<size_t>(bits), m, codes);
        dequantize<add>(codes, m, dequantizer, base + i, values + i);
    }
}

template <class T>
void encode_block(const T* values, size_t n, int bits, uint8_t* record) {
    const Bounds<T> bounds = bounds_of(values, n);
    store(record, bounds.lo);
    store(record + sizeof(T), bounds.hi);
    uint8_t* codes = record + 2 * sizeof(T);
    if (!bounds.finite() || bounds.equal()) std::memset(codes, 0, (n * static_cast<size_t>(bits) + 7) / 8);
    else if (bounds.huge()) encode_codes<T, true>(values, n, bounds, bits, codes);
    else encode_codes<T, false>(values, n, bounds, bits, codes);
}

template <bool add, class T>
void decode_block(const uint8_t* record, size_t n, int bits, const T* base, T* values) {
    const Bounds<T> bounds = {load<T>(record), load<T>(record + sizeof(T))};
    const uint8_t* codes = record + 2 * sizeof(T);
    if (!bounds.finite()) fill<add>(quiet_nan<T>(), n, base, values);
    else if (bounds.equal()) fill<add>(bounds.lo, n, base, values);
    else if (bounds.huge()) decode_codes<add, T, true>(codes, n, bounds, bits, base, values);
    else decode_codes<add, T, false>(codes, n, bounds, bits, base, values);
}

// ---- tiles ----

template <class T>
void encode(const T* values, size_t n, uint8_t* wire, Config config) {
    const size_t block = static_cast<size_t>(config.second), bits = static_cast<size_t>(config.first);
    for (size_t i = 0; i < n; i += block) {
        encode_block(values + i, smaller(block, n - i), config.first, wire);
        wire += 2 * sizeof(T) + block * bits / 8;
    }
}

template <bool add, class T>
void decode_tile(const uint8_t* wire, size_t n, const T* base, T* values, Config config) {
    const size_t block = static_cast<size_t>(config.second), bits = static_cast<size_t>(config.first);
    for (size_t i = 0; i < n; i += block) {
        decode_block<add>(wire, smaller(block, n - i), config.first, base + i, values + i);
        wire += 2 * sizeof(T) + block * bits / 8;
    }
}

template <class T>
void decode(const uint8_t* wire, size_t n, T* values, Config config) {
    decode_tile<false, T>(wire, n, values, values, config);
}

constexpr Kernels these_kernels = {{encode<float>, decode<float>, decode_tile<true, float>},
                                   {encode<double>, decode<double>, decode_tile<true, double>}};

}  // namespace
}  // namespace compcoll
