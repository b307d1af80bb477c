// ZFP over a tile: the loops that zfp_portable.cpp and zfp_avx2.cpp compile for their instruction sets.
#pragma once

#include "tile.h"
#include "zfp.h"

namespace compcoll {
namespace {  // each instruction set has its own copy of the code

constexpr size_t group_blocks = 64;  // 64 blocks fill maxbits whole words, whatever maxbits is

template <class T>
void encode_group(const T* values, size_t n, uint64_t* words, int maxbits) {
    const size_t blocks = (n + 3) / 4;
    for (int w = 0; w <= maxbits; ++w) words[w] = 0;
    for (size_t b = 0; b < blocks; ++b) {
        T x[4];
        const size_t count = n - 4 * b < 4 ? n - 4 * b : 4;
        std::memcpy(x, values + 4 * b, count * sizeof(T));
        zfp::pad_block(x, int(count));
        const auto bits = zfp::encode_block<T, zfp::most_words<T>>(x, maxbits);
        const size_t at = b * size_t(maxbits);
        for (int w = 0; w < (maxbits + 63) / 64; ++w) {
            words[at / 64 + w] |= bits.word[w] << at % 64;
            if (at % 64) words[at / 64 + w + 1] |= bits.word[w] >> (64 - at % 64);
        }
    }
}

template <class T>
void encode(const T* values, size_t n, uint8_t* wire, Config config) {
    const int maxbits = config.first;
    while (n > 0) {
        const size_t part = n < 4 * group_blocks ? n : 4 * group_blocks;
        uint64_t words[zfp::most_maxbits<T> + 4];
        encode_group(values, part, words, maxbits);
        const size_t bytes = ((part + 3) / 4 * maxbits + 63) / 64 * 8;
        std::memcpy(wire, words, bytes);
        wire += bytes, values += part, n -= part;
    }
}

template <class T, bool add>
void decode_tile(const uint8_t* wire, size_t n, T* values, Config config) {
    const int maxbits = config.first;
    while (n > 0) {
        const size_t part = n < 4 * group_blocks ? n : 4 * group_blocks;
        uint64_t words[zfp::most_maxbits<T> + 8] = {};
        const size_t bytes = ((part + 3) / 4 * maxbits + 63) / 64 * 8;
        std::memcpy(words, wire, bytes);
        for (size_t b = 0; 4 * b < part; ++b) {
            zfp::Bits<zfp::most_words<T>> bits;
            const size_t at = b * size_t(maxbits);
            for (int w = 0; w < (maxbits + 63) / 64; ++w) {
                bits.word[w] = words[at / 64 + w] >> at % 64;
                if (at % 64) bits.word[w] |= words[at / 64 + w + 1] << (64 - at % 64);
            }
            T x[4];
            zfp::decode_block(bits, maxbits, x);
            for (size_t i = 0; i < 4 && 4 * b + i < part; ++i) {
                if (add) values[4 * b + i] += x[i];
                else values[4 * b + i] = x[i];
            }
        }
        wire += bytes, values += part, n -= part;
    }
}

template <class T>
void decode(const uint8_t* wire, size_t n, T* values, Config config) { decode_tile<T, false>(wire, n, values, config); }

template <class T>
void decode_add(const uint8_t* wire, size_t n, T* values, Config config) { decode_tile<T, true>(wire, n, values, config); }

}  // namespace
}  // namespace compcoll
