// Loops of codecs that divide the values of a block by a scale and send one byte per value, written for the compiler's vectorizer.
// Each instruction set compiles them. Everything here is in an unnamed namespace, so that the linker never mixes functions of two
// sets.
//
// They require of a codec's struct, for values of type T (as does device_codecs.h):
//   Value, Header                     T, and the beginning of a block's record
//   Codec(first)                      constructs it from the configuration
//   header(largest)                   from the block's largest magnitude, which may be NaN or Inf
//   is_nan(header), is_zero(header)   whether the block has no codes (they are 0), as all its values are NaN, or +0
//   with_encoder(header, use)         calls use(encoder); encoder.code(x) is the byte of a value
//   with_decoder(header, use)         calls use(decoder); decoder.value(code) is the value of a byte
#pragma once

#include "blocks.h"

namespace compcoll {
namespace {

template <template <class> class Scaled, class T>
void encode_scaled(const T* values, size_t n, uint8_t* wire, Config config) {
    using Header = typename Scaled<T>::Header;
    const Scaled<T> codec(config.first);
    const auto block = static_cast<size_t>(config.second);
    for (size_t i = 0; i < n; i += block) {
        const size_t m = smaller(block, n - i);
        const T* __restrict from = values + i;
        const Header header = codec.header(largest_magnitude(from, m));
        store(wire, header);
        uint8_t* __restrict codes = wire + sizeof(Header);
        if (codec.is_zero(header) || codec.is_nan(header)) {
            std::memset(codes, 0, m);
        } else {
            codec.with_encoder(header, [=](auto encoder) {
                for (size_t j = 0; j < m; ++j) codes[j] = encoder.code(load<T>(from + j));
            });
        }
        wire += sizeof(Header) + block;
    }
}

template <template <class> class Scaled, bool add, class T>
void decode_scaled(const uint8_t* wire, size_t n, const T* base, T* values, Config config) {
    using Header = typename Scaled<T>::Header;
    const Scaled<T> codec(config.first);
    const auto block = static_cast<size_t>(config.second);
    for (size_t i = 0; i < n; i += block) {
        const size_t m = smaller(block, n - i);
        const auto header = load<Header>(wire);
        const uint8_t* codes = wire + sizeof(Header);
        if (codec.is_nan(header)) {
            fill<add>(quiet_nan<T>(), m, base + i, values + i);
        } else if (codec.is_zero(header)) {
            fill<add>(T(0), m, base + i, values + i);
        } else {
            codec.with_decoder(header, [=](auto decoder) {
                SAME_OR_APART for (size_t j = 0; j < m; ++j) put<add>(values + i + j, base + i + j, decoder.value(codes[j]));
            });
        }
        wire += sizeof(Header) + block;
    }
}

template <template <class> class Scaled, class T>
constexpr TileFunctions<T> scaled_functions = {encode_scaled<Scaled, T>, decode_scaled<Scaled, false, T>, decode_scaled<Scaled, true, T>};

template <template <class> class Scaled>
constexpr Kernels scaled_kernels = {scaled_functions<Scaled, float>, scaled_functions<Scaled, double>};

}  // namespace
}  // namespace compcoll
