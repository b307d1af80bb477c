// ZFP over a tile, for any CPU; zfp_avx512.cpp has its own loops.
//
// Groups of 64 blocks, one lane per block, go through stages that the compiler vectorizes: common exponents, fixed point,
// transform, negabinary, and the conversion of four coefficients to one string of bit planes (zfp_planes.h, which then codes
// each string by table). Decoding runs the stages backwards. Rare blocks use zfp.h one by one: blocks on the lowest exponent,
// where subnormals count, and codes that no encoder writes.
#pragma once

#include "tile.h"
#include "zfp.h"
#include "zfp_planes.h"

namespace compcoll {
namespace {  // each instruction set has its own copy of the code

constexpr int group_values = 4 * group_blocks;

template <class T>
struct Group {
    alignas(64) zfp::Unsigned<T> coefficient[4][group_blocks];
    alignas(64) T scale[group_blocks];
    alignas(64) uint64_t string[zfp::most_words<T> + 2][group_blocks];  // windows read up to two rows too far
    alignas(64) uint64_t header[group_blocks];
    alignas(64) uint64_t live[group_blocks];  // all ones if the block has coefficients
    alignas(64) uint64_t code[zfp::most_words<T>][group_blocks];
    bool rare[group_blocks];                  // left to zfp.h
    bool any_rare;
    bool mostly_long = false;                 // as the last group was
};

// --- values and coefficients -------------------------------------------------------------------------------------------------

template <class T>
void to_coefficients(const T* values, Group<T>& g) {
    using F = zfp::Format<T>;
    using U = zfp::Unsigned<T>;
    constexpr int bias = zfp::exponent_mask<T> >> 1;
    alignas(64) int largest[group_blocks];
    for (int b = 0; b < group_blocks; ++b) {
        int e[4];
        for (int i = 0; i < 4; ++i) {
            const U bits = bits_as<U>(values[4 * b + i]);
            g.coefficient[i][b] = bits;
            e[i] = int(U(bits << 1) >> (F::mantissa_bits + 1));
        }
        const int xy = e[0] > e[1] ? e[0] : e[1], zw = e[2] > e[3] ? e[2] : e[3];
        largest[b] = xy > zw ? xy : zw;
    }
    int rare = 0;
    for (int b = 0; b < group_blocks; ++b) {
        const int e = largest[b];
        const bool large = e >= F::lowest_exponent, live = large && e != zfp::exponent_mask<T>;
        rare |= int(e == F::lowest_exponent);
        g.live[b] = live ? ~uint64_t(0) : 0;
        g.header[b] = live ? uint64_t(2 * e + 3) : uint64_t(large);
        g.scale[b] = zfp::power_of_two<T>(live ? 2 * bias + F::planes - 3 - e : 0);
    }
    g.any_rare = rare != 0;
    for (int b = 0; b < group_blocks; ++b) {
        const U kept = U(g.live[b]);
        for (int i = 0; i < 4; ++i)  // below 2^(planes - 2); subnormals count only on the lowest exponent, a rare case
            g.coefficient[i][b] = U(zfp::Signed<T>(bits_as<T>(U(g.coefficient[i][b] & kept)) * g.scale[b]));
    }
    for (int b = 0; b < group_blocks; ++b) {
        U c[4] = {g.coefficient[0][b], g.coefficient[1][b], g.coefficient[2][b], g.coefficient[3][b]};
        zfp::forward_lift<T>(c);
        for (int i = 0; i < 4; ++i) g.coefficient[i][b] = zfp::to_negabinary<T>(c[i]);
    }
}

template <class T, bool add>
void from_coefficients(Group<T>& g, const T* base, T* values) {
    using F = zfp::Format<T>;
    using U = zfp::Unsigned<T>;
    for (int b = 0; b < group_blocks; ++b) {
        U c[4];
        for (int i = 0; i < 4; ++i) c[i] = zfp::from_negabinary<T>(g.coefficient[i][b]);
        zfp::inverse_lift<T>(c);
        for (int i = 0; i < 4; ++i) g.coefficient[i][b] = c[i];
    }
    for (int b = 0; b < group_blocks; ++b) {
        const int field = int(g.header[b] >> 1);
        g.scale[b] = zfp::power_of_two<T>(g.live[b] ? field - (F::planes - 2) : 0);
    }
    for (int b = 0; b < group_blocks; ++b) {
        const U nan = g.header[b] == 1 ? quiet_nan_bits<T> : U(0);
        for (int i = 0; i < 4; ++i) {
            const T value = T(zfp::Signed<T>(g.coefficient[i][b])) * g.scale[b];
            const T decoded = bits_as<T>(U(bits_as<U>(value) | nan));
            values[4 * b + i] = add ? base[4 * b + i] + decoded : decoded;
        }
    }
}

// --- coefficients and strings -------------------------------------------------------------------------------------------------

template <class T>
void to_strings(Group<T>& g, int rows) {
    using U = zfp::Unsigned<T>;
    for (int r = 0; r < rows; ++r) {
        const int shift = zfp::Format<T>::planes - 16 - 16 * r;
        for (int b = 0; b < group_blocks; ++b) {
            const U low = U(g.coefficient[0][b] >> shift & 0xffff) | U((g.coefficient[1][b] >> shift & 0xffff) << 16);
            const U high = U(g.coefficient[2][b] >> shift & 0xffff) | U((g.coefficient[3][b] >> shift & 0xffff) << 16);
            g.string[r][b] = planes_first(uint64_t(low) | uint64_t(high) << 32);
        }
    }
    for (int b = 0; b < group_blocks; ++b) g.string[0][b] |= ~g.live[b];  // anything but empty, as it is not used
}

template <class T>
void from_strings(Group<T>& g, int rows) {
    using U = zfp::Unsigned<T>;
    for (int r = 0; r < rows; ++r) {
        const int shift = zfp::Format<T>::planes - 16 - 16 * r;
        for (int b = 0; b < group_blocks; ++b) {
            const uint64_t x = coefficients_first(g.string[r][b] & g.live[b]);
            const U low = U(x), high = U(x >> 32);
            const U c[4] = {U(low & 0xffff), U(low >> 16 & 0xffff), U(high & 0xffff), U(high >> 16 & 0xffff)};
            for (int i = 0; i < 4; ++i) g.coefficient[i][b] = (r == 0 ? U(0) : g.coefficient[i][b]) | U(c[i] << shift);
        }
    }
}

// --- groups ------------------------------------------------------------------------------------------------------------------

// The most words of string that a code can fill.
template <class T>
constexpr int rows_for(int maxbits) {
    const int planes = most_planes(maxbits - zfp::header_bits<T>);
    return planes < zfp::Format<T>::planes ? (planes + 15) / 16 : zfp::most_words<T>;
}

template <class T>
using BlockBits = zfp::Bits<zfp::most_words<T>>;

// Writes consecutive bits into words; pending bits are written again with the next ones.
struct BitWriter {
    uint64_t* word;
    uint64_t pending = 0;
    int filled = 0;

    void append(uint64_t bits, int length) {  // 1 … 64 bits, zeros above
        *word = pending | bits << filled;
        filled += length;
        const bool full = filled >= 64;
        pending = full ? bits >> 1 >> (63 - (filled - length)) : *word;
        filled -= full ? 64 : 0;
        word += full;
    }
};

constexpr int words_in(int bits) { return (bits + 63) / 64; }

// Codes of more than one word. Where two table steps reach all_significant, the rest of the string is copied.
template <class T>
void encode_long(Group<T>& g, int maxbits) {
    constexpr int header = zfp::header_bits<T>;
    for (int b = 0; b < group_blocks; ++b) {
        const uint64_t* string = &g.string[0][b];
        const Start start = encode_start(string, group_blocks);
        if (start.significant == all_significant) {
            const int at = header + start.code_length, done = start.string_length;
            g.code[0][b] = start.bits << header | window(string, group_blocks, done) << at;
            for (int w = 1; w < words_in(maxbits); ++w) g.code[w][b] = window(string, group_blocks, done - at + 64 * w);
        } else {
            uint64_t code[zfp::most_words<T> + 3] = {};
            encode_planes(string, group_blocks, 16 * rows_for<T>(maxbits), header, maxbits, code);
            for (int w = 0; w < words_in(maxbits); ++w) g.code[w][b] = code[w];
        }
    }
}

// Encode 256 values as maxbits words.
template <class T>
inline __attribute__((always_inline)) void encode_group(const T* values, uint64_t* words, int maxbits, Group<T>& g) {
    constexpr int header = zfp::header_bits<T>, most_words = zfp::most_words<T>;
    const int rows = rows_for<T>(maxbits), code_words = words_in(maxbits);
    to_coefficients(values, g);
    to_strings(g, rows);
    if (maxbits <= 64) {
        if (rows == 1) encode_short<true>(g.string[0], header, maxbits, g.code[0], g.mostly_long);
        else encode_short<false>(g.string[0], header, maxbits, g.code[0], g.mostly_long);
    } else {
        encode_long(g, maxbits);
    }
    for (int w = 0; w < code_words; ++w) {
        const uint64_t kept = low_bits(maxbits - 64 * w);
        for (int b = 0; b < group_blocks; ++b) g.code[w][b] = (g.code[w][b] & g.live[b] & kept) | (w == 0 ? g.header[b] : 0);
    }
    for (int b = 0; g.any_rare && b < group_blocks; ++b) {
        if (g.header[b] != 2 * zfp::Format<T>::lowest_exponent + 3) continue;
        const T x[4] = {values[4 * b], values[4 * b + 1], values[4 * b + 2], values[4 * b + 3]};
        const BlockBits<T> bits = zfp::encode_block<T, most_words>(x, maxbits);
        for (int w = 0; w < code_words; ++w) g.code[w][b] = bits.word[w];
    }
    if (maxbits == 32) {
        for (int b = 0; b < group_blocks; b += 2) words[b / 2] = g.code[0][b] | g.code[0][b + 1] << 32;
    } else {
        BitWriter writer{words};
        for (int b = 0; b < group_blocks; ++b)
            for (int w = 0; w < code_words; ++w) writer.append(g.code[w][b], w + 1 < code_words ? 64 : maxbits - 64 * w);
    }
}

template <class T>
BlockBits<T> block_bits(const uint64_t* words, int b, int maxbits) {
    BlockBits<T> bits;
    for (int w = 0; 64 * w < maxbits; ++w) bits.word[w] = window(words, 1, b * maxbits + 64 * w);
    bits.truncate(maxbits);
    return bits;
}

// Decode codes of more than one word to strings. Mark codes as rare that start with more zeros than any encoder writes; return
// whether there are any.
template <class T>
bool decode_long(const uint64_t* words, int maxbits, Group<T>& g) {
    constexpr int header = zfp::header_bits<T>, most_words = zfp::most_words<T>;
    bool any_rare = false;
    for (int b = 0; b < group_blocks; ++b) {
        if (!g.live[b]) continue;
        const int empty = empty_planes(g.code[0][b]);
        if (empty > most_empty_planes) {
            any_rare = g.rare[b] = true;
            continue;
        }
        const Start start = decode_start(g.code[0][b], empty);
        if (start.significant == all_significant) {
            const int at = b * maxbits + header + start.code_length, done = start.string_length;
            const int end = done + maxbits - header - start.code_length;  // of the string
            g.string[0][b] = (start.bits | window(words, 1, at) << done) & low_bits(end);
            for (int r = 1; r < rows_for<T>(maxbits); ++r)
                g.string[r][b] = window(words, 1, at - done + 64 * r) & low_bits(end - 64 * r);
        } else {
            uint64_t code[most_words + 2] = {}, string[most_words + 2] = {};
            const BlockBits<T> bits = block_bits<T>(words, b, maxbits);
            std::memcpy(code, bits.word, sizeof bits.word);
            decode_planes(code, header, maxbits, string, 1, zfp::Format<T>::planes);
            for (int w = 0; w < most_words; ++w) g.string[w][b] = string[w];
        }
    }
    return any_rare;
}

// Decode maxbits words, followed by two zeros, to coefficients and headers.
template <class T>
inline __attribute__((always_inline)) void decode_group(const uint64_t* words, int maxbits, Group<T>& g) {
    constexpr int header = zfp::header_bits<T>;
    constexpr uint64_t lowest = 2 * zfp::Format<T>::lowest_exponent + 3;
    const int rows = rows_for<T>(maxbits), budget = maxbits - header;
    if (maxbits == 32) {
        for (int b = 0; b < group_blocks; b += 2) {
            g.code[0][b] = words[b / 2] & low_bits(32);
            g.code[0][b + 1] = words[b / 2] >> 32;
        }
    } else {
        for (int b = 0; b < group_blocks; ++b) g.code[0][b] = window(words, 1, b * maxbits) & low_bits(maxbits);
    }
    uint64_t any_rare = 0;
    for (int b = 0; b < group_blocks; ++b) {
        const uint64_t code = g.code[0][b];
        const uint64_t h = code & low_bits(header) & (0 - (code & 1));
        const uint64_t live = uint64_t(int64_t(lowest - h) >> 63);  // if h is greater
        g.header[b] = h;
        g.live[b] = live;
        g.code[0][b] = code >> header | ~live;  // anything but empty, as it is not used
        any_rare |= uint64_t(h == lowest);
    }
    std::memset(g.rare, 0, sizeof g.rare);
    for (int b = 0; any_rare && b < group_blocks; ++b) g.rare[b] = g.header[b] == lowest;
    if (maxbits <= 64) {
        uint64_t* const code = g.code[0];
        if (budget < most_empty_planes + 16) any_rare |= decode_short<true, true>(code, budget, g.string[0], g.rare, g.mostly_long);
        else if (rows == 1) any_rare |= decode_short<true, false>(code, budget, g.string[0], g.rare, g.mostly_long);
        else any_rare |= decode_short<false, false>(code, budget, g.string[0], g.rare, g.mostly_long);
    } else {
        any_rare |= decode_long(words, maxbits, g);
    }
    g.any_rare = any_rare != 0;
    from_strings(g, rows);
}

// --- tiles -------------------------------------------------------------------------------------------------------------------

constexpr size_t wire_bytes(size_t n, int maxbits) { return ((n + 3) / 4 * size_t(maxbits) + 63) / 64 * 8; }

template <class T>
inline __attribute__((always_inline)) void encode_tile(const T* values, size_t n, uint8_t* wire, int maxbits) {
    Group<T> g;
    std::memset(g.string, 0, sizeof g.string);
    uint64_t words[zfp::most_maxbits<T> + 2];
    for (; n >= group_values; n -= group_values, values += group_values, wire += 8 * maxbits) {
        encode_group(values, words, maxbits, g);
        std::memcpy(wire, words, size_t(8 * maxbits));
    }
    if (n == 0) return;
    T last[group_values] = {};  // missing blocks are zero, and so are their bits
    std::memcpy(last, values, n * sizeof(T));
    if (n % 4 != 0) {
        T x[4];
        std::memcpy(x, last + n / 4 * 4, sizeof x);
        zfp::pad_block(x, int(n % 4));
        std::memcpy(last + n / 4 * 4, x, sizeof x);
    }
    encode_group(last, words, maxbits, g);
    std::memcpy(wire, words, wire_bytes(n, maxbits));
}

template <class T, bool add>
inline __attribute__((always_inline)) void decode_tile(
    const uint8_t* wire, size_t n, const T* base, T* values, int maxbits) {
    Group<T> g;
    std::memset(g.string, 0, sizeof g.string);
    uint64_t words[zfp::most_maxbits<T> + 2] = {};
    while (n > 0) {
        const size_t part = n < group_values ? n : group_values;
        const size_t bytes = wire_bytes(part, maxbits);
        std::memcpy(words, wire, bytes);
        if (part < group_values) std::memset(reinterpret_cast<uint8_t*>(words) + bytes, 0, sizeof words - bytes);
        decode_group(words, maxbits, g);
        if (part == group_values && !g.any_rare) {
            from_coefficients<T, add>(g, base, values);
        } else {
            T decoded[group_values];
            from_coefficients<T, false>(g, decoded, decoded);
            for (int b = 0; b < group_blocks; ++b) {
                if (!g.rare[b]) continue;
                T x[4];
                zfp::decode_block(block_bits<T>(words, b, maxbits), maxbits, x);
                std::memcpy(decoded + 4 * b, x, sizeof x);
            }
            for (size_t i = 0; i < part; ++i) values[i] = add ? base[i] + decoded[i] : decoded[i];
        }
        wire += bytes, base += part, values += part, n -= part;
    }
}

// The usual rates have specialized code.
template <class T>
void encode(const T* values, size_t n, uint8_t* wire, Config config) {
    if (config.first == 32) encode_tile(values, n, wire, 32);
    else if (config.first == 64) encode_tile(values, n, wire, 64);
    else encode_tile(values, n, wire, config.first);
}

template <bool add, class T>
void decode(const uint8_t* wire, size_t n, const T* base, T* values, Config config) {
    if (config.first == 32) decode_tile<T, add>(wire, n, base, values, 32);
    else if (config.first == 64) decode_tile<T, add>(wire, n, base, values, 64);
    else decode_tile<T, add>(wire, n, base, values, config.first);
}

constexpr Kernels these_zfp = {{encode<float>, decode<false, float>, decode<true, float>},
                               {encode<double>, decode<false, double>, decode<true, double>}};

}  // namespace
}  // namespace compcoll
