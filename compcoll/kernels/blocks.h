// Common parts of the loops of codecs whose blocks have a header and packed codes.
#pragma once

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

// The largest magnitude of n values, n >= 1. Comparing bits gives the same result in any order and on any machine.
template <class T>
T largest_magnitude(const T* values, size_t n) {
    SignedOf<T> largest = 0;
    for (size_t i = 0; i < n; ++i) {
        const auto magnitude = magnitude_bits(load<T>(values + i));
        largest = magnitude > largest ? magnitude : largest;
    }
    return bits_as<T>(largest);
}

// ---- tiles ----
// A codec is a struct for values of type T, float or double. All of these members are required, for the CPU and the GPU
// (COMPCOLL_HD), and others are its own business:
//   Value, Header                 T, and the type of the beginning of a block's record
//   Codec(first), bits            the constructor takes `first` of codecs.h; the bits of a code are 1 to 8
//   has_codes(header)             if not, the codes are 0, and all values of the block are only_value(header)
//   only_value(header)            NaN for a block that holds NaN or Inf
//   with_encoder(header, use)     calls use(encoder); encoder.code(x) is a value's code, below 2^bits
//   with_decoder(header, use)     calls use(decoder); decoder.value(code) is a code's value. Codes are packed by packing.h
// `use` is a template, so that each format of a codec may have its own type of encoder (fp8.h). A codec of scaled_tiles.h also needs
// header(largest); the others compute headers in their own NAME_tiles.h and in device_codecs.h.

template <class Codec>
size_t codes_nbytes(const Codec& codec, size_t n) {
    return (n * static_cast<size_t>(codec.bits) + 7) / 8;
}

// header_of(values, n) is a block's header; quantize(encoder, i, n, codes) stores the codes of n values from the i-th of the tile on.
template <class Codec, class T, class HeaderOf, class Quantize>
COMPCOLL_HD void encode_blocks(const Codec& codec, const T* values, size_t n, size_t block, uint8_t* wire, HeaderOf header_of,
                               Quantize quantize) {
    for (size_t begin = 0; begin < n; begin += block) {
        const size_t length = smaller(block, n - begin);
        const typename Codec::Header header = header_of(values + begin, length);
        store(wire, header);
        wire += sizeof(header);
        if (codec.has_codes(header)) {
            codec.with_encoder(header, [&](auto encoder) {
                alignas(64) uint8_t packing_codes[slice];
                for (size_t i = 0; i < length; i += slice) {
                    const size_t m = smaller(slice, length - i);
                    uint8_t* const to = wire + codes_nbytes(codec, i);
                    uint8_t* const codes = codec.bits == 8 ? to : packing_codes;
                    if (length * sizeof(T) <= prefetched_nbytes) prefetch(values + begin + i, length, m);  // the next block
                    quantize(encoder, begin + i, m, codes);
                    if (codec.bits != 8) packings[codec.bits - 1].pack(codes, m, to);
                }
            });
        } else {
            std::memset(wire, 0, codes_nbytes(codec, length));
        }
        wire += codes_nbytes(codec, block);
    }
}

template <class T, class Encoder>
COMPCOLL_HD void quantize(const T* __restrict values, size_t n, Encoder encoder, uint8_t* __restrict codes) {
    for (size_t i = 0; i < n; ++i) codes[i] = encoder.code(load<T>(values + i));
}

template <bool add, class T, class Decoder>
COMPCOLL_HD void dequantize(const uint8_t* __restrict codes, size_t n, Decoder decoder, const T* base, T* values) {
    SAME_OR_APART for (size_t i = 0; i < n; ++i) put<add>(values + i, base + i, decoder.value(codes[i]));
}

template <template <class> class Codec, bool add, class T>
void decode_blocks(const uint8_t* wire, size_t n, const T* base, T* values, Config config) {
    using Header = typename Codec<T>::Header;
    const Codec<T> codec(config.first);
    const auto block = static_cast<size_t>(config.second);
    for (size_t begin = 0; begin < n; begin += block) {
        const size_t length = smaller(block, n - begin);
        const auto header = load<Header>(wire);
        wire += sizeof(Header);
        if (codec.has_codes(header)) {
            codec.with_decoder(header, [&](auto decoder) {
                if (codec.bits == 8) return dequantize<add>(wire, length, decoder, base + begin, values + begin);
                alignas(64) uint8_t codes[slice];
                for (size_t i = 0; i < length; i += slice) {
                    const size_t m = smaller(slice, length - i);
                    packings[codec.bits - 1].unpack(wire + codes_nbytes(codec, i), m, codes);
                    dequantize<add>(codes, m, decoder, base + begin + i, values + begin + i);
                }
            });
        } else {
            fill<add>(codec.only_value(header), length, base + begin, values + begin);
        }
        wire += codes_nbytes(codec, block);
    }
}

}  // namespace
}  // namespace compcoll
