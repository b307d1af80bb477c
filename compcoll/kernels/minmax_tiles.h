// The minmax codec's loops, written for the compiler's vectorizer. Each instruction set compiles them. Everything here is in an
// unnamed namespace, so that the linker never mixes functions of two sets.
#pragma once

#include "blocks.h"
#include "minmax.h"

namespace compcoll {
namespace {

// ---- one block ----

// The smallest and largest of some values, and whether all are finite. A Value is a T or a vector of T.
template <class Value, class Bits>
struct Extremes {
    Value smallest, largest;
    Bits not_finite;  // not 0 once a value was NaN or Inf

    COMPCOLL_HD explicit Extremes(Value x) : smallest(x), largest(x), not_finite(bits_as<Bits>(x - x)) {}

    COMPCOLL_HD void take(Value x) { merge(Extremes(x)); }

    COMPCOLL_HD void merge(const Extremes& other) {  // with the operand order of minps and maxps
        smallest = other.smallest < smallest ? other.smallest : smallest;
        largest = other.largest > largest ? other.largest : largest;
        not_finite |= other.not_finite;
    }
};

template <class T>
Bounds<T> bounds_of(const T* values, size_t n) {
    using ScalarBits = typename FloatFormat<T>::Bits;
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

constexpr Kernels these_minmax = {{encode<float>, decode_tile<false, float>, decode_tile<true, float>},
                                  {encode<double>, decode_tile<false, double>, decode_tile<true, double>}};

}  // namespace
}  // namespace compcoll
