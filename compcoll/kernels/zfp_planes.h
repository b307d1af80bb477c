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

constexpr uint64_t low_bits(int count) { return count >= 64 ? ~uint64_t(0) : count > 0 ? (uint64_t(1) << count) - 1 : 0; }

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

// Planes that a code of `bits` bits can hold: the empty ones take a bit each, the others two or more.
constexpr int most_planes(int bits) { return most_empty_planes + 1 + (bits - most_empty_planes) / 2; }

// --- codes -------------------------------------------------------------------------------------------------------------------

// What two table steps make of the first planes that are not empty. They suffice, but for smooth or sparse data.
struct Start {
    uint64_t bits;
    int code_length, string_length;
    uint32_t significant;
};

inline Start encode_start(const uint64_t* string, size_t stride) {  // the string's first word is not zero
    const int empty = __builtin_ctzll(string[0]) / 4;
    uint64_t ahead = window(string, stride, 4 * empty);
    Start start{0, empty, 4 * empty + 16, 0};
    for (int i = 0; i < 2; ++i) {
        const uint32_t entry = encode_table.entry[start.significant | (ahead & 255)];
        start.bits |= uint64_t(bits_in(entry)) << start.code_length;
        start.code_length += length_in(entry);
        start.significant = entry & significant_mask;
        ahead >>= 8;
    }
    return start;
}

inline Start decode_start(uint64_t code, int empty) {  // at least 16 bits of code follow the empty planes
    code >>= empty;
    Start start{0, empty, 4 * empty, 0};
    for (int i = 0; i < 2; ++i) {
        const uint32_t entry = decode_table.entry[start.significant | (code & 255)];
        start.bits |= uint64_t(bits_in(entry)) << start.string_length;
        start.string_length += string_bits_in(entry);
        start.code_length += length_in(entry);
        start.significant = entry & significant_mask;
        code >>= length_in(entry);
    }
    return start;
}

// Blocks whose code fits one word go in fours, step by step: four times fewer branches to mispredict, and the table's latency is
// hidden. A step more than a block needs does no harm.
constexpr int together = 4;

// The codes of four strings of one or two rows, none of them empty, from bit `start` on. Bits beyond maxbits may follow.
template <bool one_row>
inline __attribute__((always_inline)) void encode_short(const uint64_t* string, int start, int maxbits, uint64_t* codes) {
    uint64_t low[together], high[together], code[together];
    uint32_t significant[together];
    int at[together];
    const auto step = [&](int l) __attribute__((always_inline)) {
        const uint32_t entry = encode_table.entry[significant[l] | (low[l] & 255)];
        code[l] |= at[l] < 64 ? uint64_t(bits_in(entry)) << at[l] : 0;
        at[l] += length_in(entry);
        significant[l] = entry & significant_mask;
        low[l] = one_row ? low[l] >> 8 : low[l] >> 8 | high[l] << 56;
        if (!one_row) high[l] >>= 8;
    };
    bool unfinished = false;
    for (int l = 0; l < together; ++l) {
        const int empty = __builtin_ctzll(string[l]) / 4;
        high[l] = one_row ? 0 : string[group_blocks + l] >> 4 * empty;
        low[l] = string[l] >> 4 * empty | (one_row ? 0 : string[group_blocks + l] << 1 << (63 - 4 * empty));
        at[l] = start + empty;
        significant[l] = 0;
        code[l] = 0;
        step(l);
        step(l);
        unfinished |= significant[l] != all_significant;
    }
    while (unfinished) {
        unfinished = false;
        for (int l = 0; l < together; ++l) {
            step(l);
            unfinished |= significant[l] != all_significant && at[l] < maxbits;
        }
    }
    for (int l = 0; l < together; ++l) codes[l] = code[l] | (at[l] < 64 ? low[l] << at[l] : 0);
}

// The code of any string that is not empty, from bit `at` of `out` on, where `out` holds zeros. Bits beyond maxbits may follow,
// in up to two more words.
inline void encode_planes(const uint64_t* string, size_t stride, int planes, int at, int maxbits, uint64_t* out) {
    const Start start = encode_start(string, stride);
    put(out, 1, at, start.bits);
    at += start.code_length;
    int done = start.string_length;
    uint32_t significant = start.significant;
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

// Where the budget ends a search, zeros were read for the missing bits, and the one was found in the last place: it belongs where
// the search stopped. `over` is how many missing bits were read, `done` how many bits of string they all made.
inline void cut_search(uint64_t& low, uint64_t& high, int done, int over) {
    if ((low | high) == 0) return;
    uint64_t& last = high != 0 ? high : low;
    const int top = 63 - __builtin_clzll(last), plane = (top + (high != 0 ? 64 : 0)) / 4;
    const int missing = over - (done - 4 - 4 * plane);  // planes after the last one with a bit have four bits of code
    if (top % 4 == 3 && missing > 0) last ^= uint64_t(1) << top ^ uint64_t(1) << (top - missing);
}

inline int empty_planes(uint64_t code) { return __builtin_ctzll(code | uint64_t(1) << 63); }

// The strings, of one or two rows, of four codes of `budget` bits each, with zeros above. True for each that starts with zeros that
// no encoder writes: it is left to decode_block. A string of more than two words cannot come out of so few bits.
template <bool one_row>
inline __attribute__((always_inline)) void decode_short(const uint64_t* codes, int budget, uint64_t* string, bool* rare) {
    uint64_t low[together], high[together], code[together];
    uint32_t significant[together];
    int done[together], left[together];
    const auto append = [&](int l, uint64_t bits) __attribute__((always_inline)) {
        low[l] |= one_row || done[l] < 64 ? bits << (done[l] & 63) : 0;
        if (!one_row) high[l] |= done[l] < 64 ? bits >> 1 >> (63 - done[l]) : bits << (done[l] & 63);
    };
    const auto step = [&](int l) __attribute__((always_inline)) {
        const uint32_t entry = decode_table.entry[significant[l] | (code[l] & 255)];
        append(l, bits_in(entry));
        done[l] += string_bits_in(entry);
        left[l] -= length_in(entry);
        significant[l] = entry & significant_mask;
        code[l] >>= length_in(entry);
    };
    bool unfinished = false;
    for (int l = 0; l < together; ++l) {
        const int empty = __builtin_ctzll(codes[l] | uint64_t(codes[l] == 0));
        rare[l] |= empty > most_empty_planes;
        code[l] = empty > most_empty_planes ? 0 : codes[l] >> empty;
        low[l] = high[l] = 0;
        done[l] = 4 * empty;
        left[l] = budget - empty;
        significant[l] = 0;
        step(l);
        step(l);
        unfinished |= significant[l] != all_significant && code[l] != 0;
    }
    const bool cut = unfinished || budget < most_empty_planes + 16;
    while (unfinished) {
        unfinished = false;
        for (int l = 0; l < together; ++l) {
            step(l);
            unfinished |= significant[l] != all_significant && code[l] != 0;
        }
    }
    for (int l = 0; l < together; ++l) {
        if (cut && left[l] < 0 && significant[l] == all_significant) cut_search(low[l], high[l], done[l], -left[l]);
        append(l, code[l]);
        string[l] = low[l];
        if (!one_row) string[group_blocks + l] = high[l];
    }
}

// The string of any code that starts with at most most_empty_planes zeros. `code` holds maxbits bits, then zeros, two words of
// them; `string` holds zeros, with a word to spare.
inline void decode_planes(const uint64_t* code, int at, int maxbits, uint64_t* string, size_t stride, int planes) {
    const int empty = empty_planes(window(code, 1, at));
    int done = 4 * empty;
    uint32_t significant = 0;
    at += empty;
    while (significant != all_significant && at < maxbits && done < 4 * planes) {
        const uint32_t entry = decode_table.entry[significant | (window(code, 1, at) & 255)];
        uint64_t bits = bits_in(entry), none = 0;
        at += length_in(entry);
        if (at > maxbits) cut_search(bits, none, string_bits_in(entry), at - maxbits);
        put(string, stride, done, bits);
        done += string_bits_in(entry);
        significant = entry & significant_mask;
    }
    while (at < maxbits && done < 4 * planes) {  // up to the end of a word of the string
        string[size_t(done / 64) * stride] |= window(code, 1, at) << done % 64;
        at += 64 - done % 64;
        done += 64 - done % 64;
    }
}

}  // namespace
}  // namespace compcoll
