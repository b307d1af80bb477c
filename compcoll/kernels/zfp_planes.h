// ZFP's embedded coding on a processor: a block's bit planes, as one string of bits, to and from its code, by table.
//
// The *string* of a block is its planes from the most significant one, four bits a plane, sixteen planes a word. Coding it:
// leading empty planes are one 0 each, counted at once; then a table takes two planes (or eight bits of code) a step; and as
// soon as the third coefficient is significant, code and string are the same bits. The tables are made from encode_plane and
// decode_plane, so the code is defined in one place.
#pragma once

#include "zfp.h"

namespace compcoll {
namespace {  // each instruction set has its own copy

constexpr int group_blocks = 64;  // blocks coded together; they fill maxbits whole words, whatever maxbits is

// Strings of a group lie a row per word, so that lanes of blocks are contiguous: bits [at, at + 64) of one of them.
inline uint64_t window(const uint64_t* words, size_t stride, int at) {
    const uint64_t* word = words + size_t(at / 64) * stride;
    return word[0] >> at % 64 | word[stride] << 1 << (63 - at % 64);
}

inline void put(uint64_t* words, size_t stride, int at, uint64_t bits) {
    uint64_t* word = words + size_t(at / 64) * stride;
    word[0] |= bits << at % 64;
    word[stride] |= bits >> 1 >> (63 - at % 64);
}

// A table entry; `significant` stands where it is part of the next index.
constexpr uint32_t significant_mask = 3 << 8;
constexpr uint32_t all_significant = significant_mask;  // three and four coefficients have the same code

constexpr uint32_t entry_of(uint32_t bits, int length, int significant, int taken) {
    return bits << 16 | uint32_t(taken) << 10 | uint32_t(significant < 3 ? significant : 3) << 8 | uint32_t(length);
}
constexpr int length_in(uint32_t entry) { return int(entry & 0xff); }        // bits of code
constexpr int string_bits_in(uint32_t entry) { return int(entry >> 10 & 0x3f); }  // bits of string
constexpr uint32_t bits_in(uint32_t entry) { return entry >> 16; }

struct Table {
    uint32_t entry[4 * 256];
};

constexpr Table make_encode_table() {
    Table table{};
    for (uint32_t index = 0; index < 4 * 256; ++index) {
        const zfp::PlaneCode first = zfp::encode_plane(index & 15, int(index >> 8));
        const zfp::PlaneCode second = zfp::encode_plane(index >> 4 & 15, first.significant);
        table.entry[index] = entry_of(first.bits | second.bits << first.length, first.length + second.length, second.significant, 8);
    }
    return table;
}

// As many whole planes as eight bits of code hold, at most four. The longest code of a plane has seven bits.
constexpr Table make_decode_table() {
    Table table{};
    for (uint32_t index = 0; index < 4 * 256; ++index) {
        uint32_t string = 0;
        int length = 0, significant = int(index >> 8), taken = 0;
        while (taken < 16) {
            const zfp::Plane plane = zfp::decode_plane((index & 255) >> length, significant, 64);
            if (length + plane.length > 8) break;
            string |= plane.bits << taken;
            length += plane.length, significant = plane.significant, taken += 4;
        }
        table.entry[index] = entry_of(string, length, significant, taken);
    }
    return table;
}

constexpr Table encode_table = make_encode_table();
constexpr Table decode_table = make_decode_table();

// The largest of the four fixed-point values has its top bit set, and the transform shrinks it to no less than a quarter: at
// most four leading planes of a block are empty. Foreign bits may have more; the decoders below leave those to decode_block.
constexpr int most_empty_planes = 7;

// Planes that a code of `bits` bits can hold: after the empty ones each takes two bits or more.
constexpr int most_planes(int bits) { return most_empty_planes + 1 + bits / 2; }

// --- codes of at most one word, header included: `at` is where the code starts -----------------------------------------------

// The string's first word must not be zero. Bits beyond maxbits are left in the result.
inline uint64_t encode_short(const uint64_t* string, size_t stride, int planes, int at, int maxbits) {
    const int empty = __builtin_ctzll(string[0]) / 4;
    uint64_t ahead = window(string, stride, 4 * empty);
    uint64_t code = 0;
    uint32_t significant = 0;
    at += empty;
    const auto step = [&] {
        const uint32_t entry = encode_table.entry[significant | (ahead & 255)];
        code |= uint64_t(bits_in(entry)) << at;
        at += length_in(entry);
        significant = entry & significant_mask;
        ahead >>= 8;
    };
    step();
    step();
    int done = 4 * empty + 16;
    if (significant == all_significant) return code | ahead << at;
    while (significant != all_significant && at < maxbits && done < 4 * planes) {
        ahead = window(string, stride, done);
        step();
        done += 8;
    }
    return at < maxbits ? code | window(string, stride, done) << at : code;
}

// Where the budget ends a search, zeros were read for the missing bits, and the one was found in the last place: it belongs where
// the search stopped. `over` is how many of the bits that an entry stands for are missing.
inline uint32_t cut_search(uint32_t string, int string_bits, int over) {
    if (string == 0) return string;
    const int top = 31 - __builtin_clz(string);
    const int missing = over - (string_bits - 4 - top / 4 * 4);  // planes after the last one with a bit have four bits of code
    if (top % 4 != 3 || missing <= 0) return string;
    return string ^ 1u << top ^ 1u << (top - missing);
}

struct String {
    uint64_t word[2];
    bool decoded;
};

// `code` has `budget` bits, zeros above. A string of more than two words cannot come out of so few bits.
template <bool two_steps_fit, bool one_word>
inline String decode_short(uint64_t code, int budget) {
    const int empty = __builtin_ctzll(code | uint64_t(1) << 63);
    if (empty > most_empty_planes) return {{0, 0}, code == 0};
    uint64_t low = 0, high = 0;
    uint32_t significant = 0;
    int done = 4 * empty;
    code >>= empty;
    budget -= empty;
    if (two_steps_fit) {  // at most 28 + 32 bits of string
        for (int i = 0; i < 2; ++i) {
            const uint32_t entry = decode_table.entry[significant | (code & 255)];
            low |= uint64_t(bits_in(entry)) << done;
            done += string_bits_in(entry);
            significant = entry & significant_mask;
            code >>= length_in(entry);
            budget -= length_in(entry);
        }
    }
    while (significant != all_significant && code != 0) {
        const uint32_t entry = decode_table.entry[significant | (code & 255)];
        uint32_t bits = bits_in(entry);
        budget -= length_in(entry);
        if (budget < 0) bits = cut_search(bits, string_bits_in(entry), -budget);
        if (one_word || done < 64) low |= uint64_t(bits) << (done & 63);
        if (!one_word && done > 48) high |= done < 64 ? uint64_t(bits) >> (64 - done) : uint64_t(bits) << (done & 63);
        done += string_bits_in(entry);
        significant = entry & significant_mask;
        code >>= length_in(entry);
    }
    if (one_word || done < 64) low |= code << (done & 63);
    if (!one_word && done > 0) high |= done < 64 ? code >> (64 - done) : code << (done & 63);
    return {{low, high}, true};
}

// --- codes of any length -----------------------------------------------------------------------------------------------------

// Adds the code to `out`, which holds zeros from bit `at` on, and has a word to spare; stops at maxbits or later.
inline void encode_long(const uint64_t* string, size_t stride, int planes, int at, int maxbits, uint64_t* out) {
    const int empty = __builtin_ctzll(string[0]) / 4;
    int done = 4 * empty;
    uint32_t significant = 0;
    at += empty;
    while (significant != all_significant && at < maxbits && done < 4 * planes) {
        const uint32_t entry = encode_table.entry[significant | (window(string, stride, done) & 255)];
        put(out, 1, at, bits_in(entry));
        at += length_in(entry);
        significant = entry & significant_mask;
        done += 8;
    }
    while (at < maxbits && done < 4 * planes) {  // up to the end of a word of `out`
        out[at / 64] |= window(string, stride, done) << at % 64;
        done += 64 - at % 64;
        at += 64 - at % 64;
    }
}

// `code` holds maxbits bits, then zeros, with a word to spare; `string` holds zeros. False where decode_block is needed.
inline bool decode_long(const uint64_t* code, int at, int maxbits, uint64_t* string, size_t stride, int planes) {
    const int empty = __builtin_ctzll(window(code, 1, at) | uint64_t(1) << 63);
    if (empty > most_empty_planes) return false;
    int done = 4 * empty;
    uint32_t significant = 0;
    at += empty;
    while (significant != all_significant && at < maxbits && done < 4 * planes) {
        const uint32_t entry = decode_table.entry[significant | (window(code, 1, at) & 255)];
        uint32_t bits = bits_in(entry);
        at += length_in(entry);
        if (at > maxbits) bits = cut_search(bits, string_bits_in(entry), at - maxbits);
        put(string, stride, done, bits);
        done += string_bits_in(entry);
        significant = entry & significant_mask;
    }
    while (at < maxbits && done < 4 * planes) {  // up to the end of a word of the string
        string[size_t(done / 64) * stride] |= window(code, 1, at) << done % 64;
        at += 64 - done % 64;
        done += 64 - done % 64;
    }
    return true;
}

}  // namespace
}  // namespace compcoll
