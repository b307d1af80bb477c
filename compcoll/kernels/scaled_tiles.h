// Loops of codecs whose header of a block, such as a scale, follows from its largest magnitude; for the compiler's vectorizer.
// Each instruction set compiles them. Everything here is in an unnamed namespace, so that the linker never mixes functions of two
// sets.
//
// Each codec of COMPCOLL_EACH_SCALED_CODEC has these loops. Beyond the members in blocks.h they need header(largest), the
// header of a block whose largest magnitude is this; it may be NaN or Inf.
#pragma once

#include "blocks.h"

namespace compcoll {
namespace {

template <template <class> class Codec, class T>
void encode_scaled(const T* values, size_t n, uint8_t* wire, Config config) {
    const Codec<T> codec(config.first);
    encode_blocks(
        codec, values, n, static_cast<size_t>(config.second), wire,
        [&](const T* block, size_t length) { return codec.header(largest_magnitude(block, length)); },
        [values](auto encoder, size_t i, size_t m, uint8_t* codes) { quantize(values + i, m, encoder, codes); });
}

template <template <class> class Codec, class T>
constexpr TileFunctions<T> functions = {encode_scaled<Codec, T>, decode_blocks<Codec, false, T>, decode_blocks<Codec, true, T>};

template <template <class> class Codec>
constexpr Kernels scaled_kernels = {functions<Codec, float>, functions<Codec, double>};

}  // namespace
}  // namespace compcoll
