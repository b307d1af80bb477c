// The fp8 codec's loops, written for the compiler's vectorizer. Each fp8_*.cpp compiles them for its instruction set:
// everything here is in an unnamed namespace, so that the linker never takes one set's function for another's.
#pragma once

#include "blocks.h"
#include "fp8.h"

namespace compcoll {
namespace {

constexpr size_t header_nbytes = 2;

template <class Format, class T>
void encode_as(const T* values, size_t n, size_t block, uint8_t* wire) {
    for (size_t i = 0; i < n; i += block) {
        const size_t m = smaller(block, n - i);
        const T* __restrict from = values + i;
        const T largest = largest_magnitude(from, m);
        const BlockScale<T, Format> scale{is_tiny(largest) ? 0 : biased_exponent(largest)};
        store(wire, static_cast<uint16_t>(scale.exponent));
        uint8_t* __restrict codes = wire + header_nbytes;
        if (scale.is_zero() || scale.is_nan()) {
            std::memset(codes, 0, m);
        } else {
            const T factor = scale.down();
            const int32_t most = scale.most();
            for (size_t j = 0; j < m; ++j)
                codes[j] = Format::narrowed(to_round_further(load<T>(from + j) * factor), most);
        }
        wire += header_nbytes + block;
    }
}

template <class Format, bool add, class T>
void decode_as(const uint8_t* wire, size_t n, size_t block, const T* base, T* values) {
    for (size_t i = 0; i < n; i += block) {
        const size_t m = smaller(block, n - i);
        const BlockScale<T, Format> scale{load<uint16_t>(wire)};
        const uint8_t* codes = wire + header_nbytes;
        if (scale.is_nan()) {
            fill<add>(quiet_nan<T>(), m, base + i, values + i);
        } else if (scale.is_zero()) {
            fill<add>(T(0), m, base + i, values + i);
        } else {
            const T factor = scale.up();
            SAME_OR_APART for (size_t j = 0; j < m; ++j)
                put<add>(values + i + j, base + i + j, widened_as(Format::widened(codes[j]), T()) * factor);
        }
        wire += header_nbytes + block;
    }
}

// ---- tiles ----

template <class T>
void encode(const T* values, size_t n, uint8_t* wire, Config config) {
    const auto block = static_cast<size_t>(config.second);
    if (config.first == E4M3::exponent_bits) encode_as<E4M3>(values, n, block, wire);
    else encode_as<E5M2>(values, n, block, wire);
}

template <bool add, class T>
void decode_tile(const uint8_t* wire, size_t n, const T* base, T* values, Config config) {
    const auto block = static_cast<size_t>(config.second);
    if (config.first == E4M3::exponent_bits) decode_as<E4M3, add>(wire, n, block, base, values);
    else decode_as<E5M2, add>(wire, n, block, base, values);
}

template <class T>
void decode(const uint8_t* wire, size_t n, T* values, Config config) {
    decode_tile<false, T>(wire, n, values, values, config);
}

constexpr Kernels these_kernels = {{encode<float>, decode<float>, decode_tile<true, float>},
                                   {encode<double>, decode<double>, decode_tile<true, double>}};

}  // namespace
}  // namespace compcoll
