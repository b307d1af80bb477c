// The onebit codec's loops. Each instruction set compiles them. Everything here is in an unnamed namespace, so that the linker
// never mixes functions of two sets.
#pragma once

#include <type_traits>

#include "blocks.h"
#include "onebit.h"

namespace compcoll {
namespace {

// ---- sign bits, and values by sign bits ----

// The signs of so many values are a mask.
template <class T> constexpr size_t masked = 64 / sizeof(T);
template <class T> using SignMask = std::conditional_t<sizeof(T) == 8, uint8_t, uint16_t>;

// Write the signs, and return the largest magnitude.
template <class T>
T write_signs(const T* values, size_t n, uint8_t* wire) {
    using Lanes = typename VectorOf<T>::Signed;
    Lanes magnitudes = {};
    size_t i = 0;
    for (; i + masked<T> <= n; i += masked<T>) {
        uint32_t signs = 0;
        for (size_t lane = 0; lane < masked<T>; lane += lanes<T>) {
            const auto bits = load<Lanes>(values + i + lane);
            const Lanes magnitude = bits & SignedOf<T>(all_but_sign<T>);
            magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
            signs |= sign_bits<T>(bits) << lane;
        }
        store(wire + i / 8, static_cast<SignMask<T>>(signs));
    }
    SignedOf<T> largest = 0;
    const auto take = [&largest](SignedOf<T> magnitude) { largest = magnitude > largest ? magnitude : largest; };
    for (size_t lane = 0; lane < lanes<T>; ++lane) take(magnitudes[lane]);
    for (; i < n; i += 8) {
        uint32_t signs = 0;
        for (size_t k = 0; k < smaller(8, n - i); ++k) {
            const T value = load<T>(values + i + k);
            take(magnitude_bits(value));
            signs |= uint32_t(sign_bit(value)) << k;
        }
        wire[i / 8] = static_cast<uint8_t>(signs);
    }
    return bits_as<T>(largest);
}

template <bool add, class T>
void read_signs(const uint8_t* wire, size_t n, Reconstruction<T> by_sign, const T* base, T* values) {
    using Values = typename VectorOf<T>::Values;
    const Values positive = Values() + by_sign.positive, negative = Values() + by_sign.negative;
    size_t i = 0;
    for (; i + masked<T> <= n; i += masked<T>) {
        const auto signs = load<SignMask<T>>(wire + i / 8);
        for (size_t lane = 0; lane < masked<T>; lane += lanes<T>)
            put<add>(reinterpret_cast<Values*>(values + i + lane), reinterpret_cast<const Values*>(base + i + lane),
                     chosen<T>(signs >> lane, positive, negative));
    }
    for (; i < n; ++i) put<add>(values + i, base + i, wire[i / 8] >> i % 8 & 1 ? by_sign.negative : by_sign.positive);
}

// ---- one block ----

template <class T>
SignedSums signed_sums(const T* values, size_t n, FixedPoint<T> fixed) {
    SignedSums sums{0, 0, 0};
    for (size_t i = 0; i < n; i += slice) {  // within a slice 32 bits suffice
        const size_t m = smaller(slice, n - i);
        int32_t all = 0, positive = 0;
        for (size_t j = 0; j < m; ++j) {
            const int32_t q = fixed.of(load<T>(values + i + j));
            all += q;
            positive += q > 0 ? q : 0;
        }
        sums.positive += positive;
        sums.negative += all - positive;
    }
    return sums;
}

inline int64_t count_bits(const uint8_t* wire, size_t nbytes) {
    int64_t count = 0;
    size_t i = 0;
    for (; i + 8 <= nbytes; i += 8) count += __builtin_popcountll(load<uint64_t>(wire + i));
    for (; i < nbytes; ++i) count += __builtin_popcountll(wire[i]);
    return count;
}

template <class T>
constexpr size_t header_nbytes(int reconstructions) {
    return static_cast<size_t>(reconstructions) * sizeof(T);
}

template <class T>
void encode_block(const T* values, size_t n, int reconstructions, uint8_t* record) {
    const size_t signs_nbytes = (n + 7) / 8;
    uint8_t* wire = record + header_nbytes<T>(reconstructions);
    const T largest = write_signs(values, n, wire);
    Reconstruction<T> by_sign{T(0), T(0)};
    if (!is_finite(largest) || is_tiny(largest)) {
        if (!is_finite(largest)) by_sign = {quiet_nan<T>(), quiet_nan<T>()};
        std::memset(wire, 0, signs_nbytes);
    } else {
        if (n * sizeof(T) <= prefetched_nbytes) prefetch(values, n, n);  // the next block
        SignedSums sums = signed_sums(values, n, FixedPoint<T>(largest));
        sums.negatives = count_bits(wire, signs_nbytes);
        by_sign = sums.reconstruction(reconstructions, static_cast<int64_t>(n), largest);
    }
    store(record, by_sign.positive);
    if (reconstructions == 2) store(record + sizeof(T), by_sign.negative);
}

template <bool add, class T>
void decode_block(const uint8_t* record, size_t n, int reconstructions, const T* base, T* values) {
    const T positive = load<T>(record);
    const Reconstruction<T> by_sign{positive, reconstructions == 2 ? load<T>(record + sizeof(T)) : -positive};
    if (!is_finite(by_sign.positive) || !is_finite(by_sign.negative)) return fill<add>(quiet_nan<T>(), n, base, values);
    read_signs<add>(record + header_nbytes<T>(reconstructions), n, by_sign, base, values);
}

// ---- tiles ----

template <class T>
void encode(const T* values, size_t n, uint8_t* wire, Config config) {
    const size_t block = static_cast<size_t>(config.second);
    for (size_t i = 0; i < n; i += block) {
        encode_block(values + i, smaller(block, n - i), config.first, wire);
        wire += header_nbytes<T>(config.first) + block / 8;
    }
}

template <bool add, class T>
void decode_tile(const uint8_t* wire, size_t n, const T* base, T* values, Config config) {
    const size_t block = static_cast<size_t>(config.second);
    for (size_t i = 0; i < n; i += block) {
        decode_block<add>(wire, smaller(block, n - i), config.first, base + i, values + i);
        wire += header_nbytes<T>(config.first) + block / 8;
    }
}

template <class T>
constexpr TileFunctions<T> functions = {encode<T>, decode_tile<false, T>, decode_tile<true, T>};

constexpr Kernels these_onebit = {functions<float>, functions<double>};

}  // namespace
}  // namespace compcoll
