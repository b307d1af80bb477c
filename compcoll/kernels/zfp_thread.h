// ZFP, one block per thread: the steps of zfp.h, with planes coded by table (zfp_strings.h). Everything stays in registers. Rare
// cases (blocks on the lowest exponent, codes that no encoder writes) use zfp.h itself.
#pragma once

#include "floats.h"
#include "zfp_strings.h"

namespace compcoll::zfp {

#if defined(__CUDA_ARCH__)
constexpr bool keeps_subnormals = true;  // exact_product keeps them with any compiler option
#else
constexpr bool keeps_subnormals = false;
#endif

// The exponent field of the largest magnitude, by the maximum of the upper halves: a processor compares three of them at once.
template <class T>
COMPCOLL_HD int block_exponent(const T (&x)[block_size]) {
    uint32_t largest = 0;
    for (int i = 0; i < block_size; ++i) {
        const auto upper = static_cast<uint32_t>(bits_as<Unsigned<T>>(x[i]) >> (Format<T>::planes - 32)) << 1;
        largest = upper > largest ? upper : largest;
    }
    return static_cast<int>(largest >> (32 - Format<T>::exponent_bits));
}

template <class T>
COMPCOLL_HD void to_coefficients(const T (&x)[block_size], int exponent, Unsigned<T> (&c)[block_size]) {
    using F = Format<T>;
    if (!keeps_subnormals && exponent == F::lowest_exponent) {  // only here do subnormals count
        for (int i = 0; i < block_size; ++i) c[i] = Unsigned<T>(to_fixed(x[i], exponent));
    } else {
        const T scale = power_of_two<T>(exponent_mask<T> - 1 + F::planes - 3 - exponent);
        for (int i = 0; i < block_size; ++i) c[i] = Unsigned<T>(Signed<T>(exact_product(x[i], scale)));  // below 2^(planes - 2)
    }
    forward_lift<T>(c);
    for (int i = 0; i < block_size; ++i) c[i] = to_negabinary<T>(c[i]);
}

template <class T>
COMPCOLL_HD void from_coefficients(Unsigned<T> (&c)[block_size], int exponent, T (&x)[block_size]) {
    using F = Format<T>;
    for (int i = 0; i < block_size; ++i) c[i] = from_negabinary<T>(c[i]);
    inverse_lift<T>(c);
    if (!keeps_subnormals && exponent == F::lowest_exponent) {
        for (int i = 0; i < block_size; ++i) x[i] = from_fixed<T>(Signed<T>(c[i]), exponent);
    } else {
        // On the lowest exponent the scale is subnormal: half of the smallest normal number.
        constexpr auto smallest = Unsigned<T>(1) << (F::mantissa_bits - 1);
        const auto bits = Unsigned<T>(exponent + 1 - (F::planes - 2)) << F::mantissa_bits;
        const T scale = bits_as<T>(bits > smallest ? bits : smallest);
        for (int i = 0; i < block_size; ++i) x[i] = exact_product(T(Signed<T>(c[i])), scale);
    }
}

// With all coefficients significant, no table is needed.
constexpr int table_entries = 3 * 256;

// ---- eight planes of four coefficients --------------------------------------------------------------------------------------
// The upper bytes of c2, c0, c3 and c1, in this order, form a word. A bit's address in it has five binary digits. To get from there
// to (plane, coefficient), top plane first, takes three exchanges of two digits; any other order of the bytes takes four.

COMPCOLL_HD uint32_t exchange(uint32_t x, int distance, uint32_t mask) {
    const uint32_t difference = (x >> distance ^ x) & mask;
    return x ^ difference ^ difference << distance;
}

// Select bytes of two words; `which` has four bits per byte, the lowest first. This is one instruction on a GPU.
COMPCOLL_HD uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t which) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(low, high, which);
#else
    const uint64_t pair = low | uint64_t(high) << 32;
    uint32_t bytes = 0;
    for (int k = 0; k < 4; ++k) bytes |= static_cast<uint32_t>(pair >> 8 * (which >> 4 * k & 7) & 255) << 8 * k;
    return bytes;
#endif
}

template <class T>
COMPCOLL_HD uint32_t upper_word(Unsigned<T> c) { return static_cast<uint32_t>(c >> (Format<T>::planes - 32)); }

// The eight highest planes, the first in the lowest four bits.
template <class T>
COMPCOLL_HD uint32_t eight_planes(const Unsigned<T> (&c)[block_size]) {
    const uint32_t first = bytes_of(upper_word<T>(c[2]), upper_word<T>(c[0]), 0x0073), second = bytes_of(upper_word<T>(c[3]), upper_word<T>(c[1]), 0x0073);
    uint32_t planes = bytes_of(first, second, 0x5410);
    planes = exchange(planes, 15, 0x0000aaaa);  // digits 4 and 0
    planes = exchange(planes, 20, 0x00000f0f);  // digits 4 and 2, both complemented
    return exchange(planes, 10, 0x00330033);    // digits 3 and 1, both complemented
}

// The inverse: the coefficients' bytes, highest plane first, from that of c2 to that of c1.
COMPCOLL_HD uint32_t bytes_of_planes(uint32_t planes) {
    planes = exchange(planes, 10, 0x00330033);
    planes = exchange(planes, 20, 0x00000f0f);
    return exchange(planes, 15, 0x0000aaaa);
}

// ---- codes as numbers -------------------------------------------------------------------------------------------------------

// The type for a code of one word, half a word, or more.
template <int W, bool half>
struct CodeWords {
    using type = Bits<W>;
};
template <>
struct CodeWords<1, false> {
    using type = uint64_t;
};
template <>
struct CodeWords<1, true> {
    using type = uint32_t;
};

// Shift by any number of bits. The result is 0 if all bits are shifted out: GPUs do this, C++ leaves it undefined.
COMPCOLL_HD uint32_t shifted_up(uint32_t bits, int by) {
#if defined(__CUDA_ARCH__)
    uint32_t shifted;
    asm("shl.b32 %0, %1, %2;" : "=r"(shifted) : "r"(bits), "r"(by));
    return shifted;
#else
    return by < 32 ? bits << by : 0;
#endif
}
COMPCOLL_HD uint64_t shifted_up(uint64_t bits, int by) {
#if defined(__CUDA_ARCH__)
    uint64_t shifted;
    asm("shl.b64 %0, %1, %2;" : "=l"(shifted) : "l"(bits), "r"(by));
    return shifted;
#else
    return by < 64 ? bits << by : 0;
#endif
}
COMPCOLL_HD uint32_t shifted_down(uint32_t bits, int by) {
#if defined(__CUDA_ARCH__)
    uint32_t shifted;
    asm("shr.u32 %0, %1, %2;" : "=r"(shifted) : "r"(bits), "r"(by));
    return shifted;
#else
    return by < 32 ? bits >> by : 0;
#endif
}
COMPCOLL_HD uint64_t shifted_down(uint64_t bits, int by) {
#if defined(__CUDA_ARCH__)
    uint64_t shifted;
    asm("shr.u64 %0, %1, %2;" : "=l"(shifted) : "l"(bits), "r"(by));
    return shifted;
#else
    return by < 64 ? bits >> by : 0;
#endif
}

template <class Word>
COMPCOLL_HD void put(Word& code, int at, uint32_t bits) { code |= shifted_up(Word(bits), at); }
template <int W>
COMPCOLL_HD void put(Bits<W>& code, int at, uint32_t bits) { code.put(at, bits); }

template <class Word>
COMPCOLL_HD uint32_t first_bits(Word code) { return static_cast<uint32_t>(code); }
template <int W>
COMPCOLL_HD uint32_t first_bits(const Bits<W>& code) { return static_cast<uint32_t>(code.word[0]); }

template <class Word>
COMPCOLL_HD void skip(Word& code, int count) { code = shifted_down(code, count); }
template <int W>
COMPCOLL_HD void skip(Bits<W>& code, int count) { code = code.without_first(count); }

template <class Word>
COMPCOLL_HD bool is_empty(Word code) { return code == 0; }
template <int W>
COMPCOLL_HD bool is_empty(const Bits<W>& code) {
    uint64_t any = 0;
    for (int w = 0; w < W; ++w) any |= code.word[w];
    return any == 0;
}

// ---- blocks -----------------------------------------------------------------------------------------------------------------

// Return the code of coefficients that are not all 0, after a header. maxbits <= 64·W, and with `half` <= 32.
template <class T, int W, bool half>
COMPCOLL_HD Bits<W> code_of(Unsigned<T> (&c)[block_size], uint32_t header, int maxbits, const uint32_t* table) {
    using Code = typename CodeWords<W, half>::type;
    // At most four planes of an encoder's block are empty.
    const int empty = leading_zeros(upper_word<T>(c[0] | c[1] | c[2] | c[3]));
    for (int i = 0; i < block_size; ++i) c[i] <<= empty;
    Code code{};
    put(code, 0, header);
    int at = header_bits<T> + empty;
    uint32_t significant = 0;
    for (;;) {  // zeros follow the last plane, and their codes are zeros
        uint32_t string = eight_planes<T>(c);
        int left = 32;
        while (significant != all_significant && left > 0 && at < maxbits) {
            const uint32_t entry = table[significant | (string & 255)];
            put(code, at, bits_in(entry));
            at += length_in(entry);
            significant = entry & significant_mask;
            string >>= 8;
            left -= 8;
        }
        put(code, at, string);
        at += left;
        if (at >= maxbits) break;
        for (int i = 0; i < block_size; ++i) c[i] <<= 8;
    }
    Bits<W> out;
    if constexpr (half) out.word[0] = code & ~uint32_t(0) >> (32 - maxbits);
    else if constexpr (W == 1) out.word[0] = code;
    else out = code;
    if constexpr (!half) out.truncate(maxbits);
    return out;
}

// Reads a code: eight planes at a time, or fewer while it is not known which coefficients are significant.
template <class Code>
struct PlaneReader {
    Code code;  // zeros follow the `left` bits
    int left;
    uint32_t significant = 0;

    // Return the coefficients' bytes, as in bytes_of_planes, and in `planes` the number of planes they hold.
    COMPCOLL_HD uint32_t next(const uint32_t* table, int& planes) {
        uint32_t string = 0, entry = 0, done = 0;
        while (significant != all_significant && left > 0 && done <= 16) {  // an entry has at most 16 bits
            entry = table[significant | (first_bits(code) & 255)];
            left -= length_in(entry);
            string |= bits_in(entry) << done;
            done += string_bits_in(entry);
            significant = entry & significant_mask;
            skip(code, length_in(entry));
        }
        if (left < 0) {  // the code ended within the last entry
            uint64_t bits = bits_in(entry), none = 0;
            cut_search(bits, none, string_bits_in(entry), -left);
            string ^= (static_cast<uint32_t>(bits) ^ bits_in(entry)) << (done - string_bits_in(entry));
            left = 0;
        }
        if (significant == all_significant) {
            string |= shifted_up(first_bits(code), done);
            skip(code, 32 - done);
            done = 32;
        }
        planes = static_cast<int>(done / 4);
        return bytes_of_planes(string);
    }
};

// Decode a code of `left` bits, followed by zeros, that starts with `empty` zeros, at most most_empty_planes.
template <class T, class Code>
COMPCOLL_HD void coefficients_of(Code code, int empty, int left, const uint32_t* table, Unsigned<T> (&c)[block_size]) {
    skip(code, empty);
    PlaneReader<Code> reader{code, left - empty};
    const auto coefficient = [](uint32_t bytes, int i, int plane) {
        const uint32_t upper = bytes_of(bytes, 0, i == 0 ? 0x1444 : i == 1 ? 0x3444 : i == 2 ? 0x0444 : 0x2444);
        return shifted_down(Unsigned<T>(upper) << (Format<T>::planes - 32), plane);
    };
    int planes;
    uint32_t bytes = reader.next(table, planes);
    for (int i = 0; i < block_size; ++i) c[i] = coefficient(bytes, i, empty);
    for (int plane = empty + planes; !is_empty(reader.code); plane += planes) {
        bytes = reader.next(table, planes);
        for (int i = 0; i < block_size; ++i) c[i] |= coefficient(bytes, i, plane);
    }
}

// Return a block's first maxbits bits, as encode_block of zfp.h does; the rest is zero.
template <class T, int W, bool half>
COMPCOLL_HD Bits<W> encode_by_table(const T (&x)[block_size], int maxbits, const uint32_t* table) {
    const int exponent = block_exponent(x);
    if (exponent < Format<T>::lowest_exponent || exponent == exponent_mask<T>) {
        Bits<W> out;
        out.word[0] = exponent == exponent_mask<T>;
        return out;
    }
    Unsigned<T> c[block_size];
    to_coefficients<T>(x, exponent, c);
    return code_of<T, W, half>(c, 2 * uint32_t(exponent) + 3, maxbits, table);
}

// decode_block of zfp.h by table: any bits are a valid block. Bits from maxbits on must be zero.
template <class T, int W, bool half>
COMPCOLL_HD void decode_by_table(const Bits<W>& in, int maxbits, T (&x)[block_size], const uint32_t* table) {
    using Code = typename CodeWords<W, half>::type;
    Code code;
    if constexpr (W == 1) code = static_cast<Code>(in.word[0]);
    else code = in;
    const uint32_t header = first_bits(code) & ((1u << header_bits<T>) - 1);
    const int exponent = int(header >> 1) - 1;
    if ((header & 1) == 0 || exponent < Format<T>::lowest_exponent) {
        const T value = bits_as<T>(header == 1 ? quiet_nan<T> : Unsigned<T>(0));
        for (int i = 0; i < block_size; ++i) x[i] = value;
        return;
    }
    skip(code, header_bits<T>);
    const int empty = trailing_zeros(first_bits(code) | 1u << 31);
    if (empty > most_empty_planes) {
        decode_block<T, W>(in, maxbits, x);
        return;
    }
    Unsigned<T> c[block_size];
    coefficients_of<T>(code, empty, maxbits - header_bits<T>, table, c);
    from_coefficients<T>(c, exponent, x);
}

}  // namespace compcoll::zfp
