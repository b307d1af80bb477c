// ZFP's embedded coding on a CPU: strings (zfp_strings.h) to and from codes, 64 blocks together.
#pragma once

#include "zfp_strings.h"

namespace compcoll {
namespace {  // each instruction set has its own copy

constexpr Table encode_table = make_encode_table();
constexpr Table decode_table = make_decode_table();

constexpr int group_blocks = 64;  // blocks coded together; they fill maxbits whole words for any maxbits

// Return the bits [at, at + 64) of a string. The strings of a group have one row per word, so that lanes of blocks are contiguous.
inline uint64_t window(const uint64_t* words, size_t stride, int at) {
    const uint64_t* word = words + size_t(at / 64) * stride;
    return word[0] >> at % 64 | word[stride] << 1 << (63 - at % 64);
}

inline void put(uint64_t* words, size_t stride, int at, uint64_t bits) {
    uint64_t* word = words + size_t(at / 64) * stride;
    word[0] |= bits << at % 64;
    word[stride] |= bits >> 1 >> (63 - at % 64);
}

// --- codes that fit one word, header included --------------------------------------------------------------------------------
// Such blocks are first tried with two steps. Blocks that need more are then processed in fours, in lockstep: extra steps do no
// harm, there are fewer branches, and the table's latency is hidden. In smooth data most blocks need more. If the previous
// group was like that (`mostly_long`), the trial is skipped.
constexpr int together = 4;

struct List {
    int count = 0;
    uint8_t block[group_blocks + together];

    void add_if(bool yes, int b) { block[count] = uint8_t(b), count += yes; }
    void fill_up() {  // to a multiple of `together`, by repeating a block
        for (int i = 0; i < together - 1; ++i) block[count + i] = block[0];
    }
};

// Encode four nonempty strings of one or two rows, from bit `start` on. Bits beyond maxbits may follow. Return whether two steps
// were too few.
template <bool one_row>
inline bool encode_four(const uint64_t* string, int start, int maxbits, uint64_t* codes, const uint8_t* block) {
    uint64_t low[together], high[together], code[together];
    uint32_t significant[together];
    int at[together];
    for (int l = 0; l < together; ++l) {
        const int b = block[l], empty = __builtin_ctzll(string[b]) / 4;
        high[l] = one_row ? 0 : string[group_blocks + b] >> 4 * empty;
        low[l] = string[b] >> 4 * empty | (one_row ? 0 : string[group_blocks + b] << 1 << (63 - 4 * empty));
        at[l] = start + empty;
        significant[l] = 0;
        code[l] = 0;
    }
    bool unfinished = true;
    int steps = 0;
    for (; unfinished; ++steps) {
        unfinished = false;
        for (int l = 0; l < together; ++l) {
            const uint32_t entry = encode_table.entry[significant[l] | (low[l] & 255)];
            code[l] |= at[l] < 64 ? uint64_t(bits_in(entry)) << at[l] : 0;
            at[l] += length_in(entry);
            significant[l] = entry & significant_mask;
            low[l] = one_row ? low[l] >> 8 : low[l] >> 8 | high[l] << 56;
            if (!one_row) high[l] >>= 8;
            unfinished |= significant[l] != all_significant && at[l] < maxbits;
        }
    }
    for (int l = 0; l < together; ++l) codes[block[l]] = code[l] | (at[l] < 64 ? low[l] << at[l] : 0);
    return steps > 2;
}

template <bool one_row>
inline void encode_short(const uint64_t* string, int start, int maxbits, uint64_t* codes, bool& mostly_long) {
    List longer;
    for (int b = 0; mostly_long && b < group_blocks; ++b) longer.add_if(true, b);
    for (int b = 0; !mostly_long && b < group_blocks; ++b) {
        const int empty = __builtin_ctzll(string[b]) / 4;
        uint64_t ahead = string[b] >> 4 * empty;
        if (!one_row) ahead |= string[group_blocks + b] << 1 << (63 - 4 * empty);
        const uint32_t first = encode_table.entry[ahead & 255];
        const uint32_t second = encode_table.entry[(first & significant_mask) | (ahead >> 8 & 255)];
        const int at = start + empty;
        codes[b] = (bits_in(first) | uint64_t(bits_in(second)) << length_in(first) |
                    ahead >> 16 << length_in(first + second)) << at;
        longer.add_if((second & significant_mask) != all_significant, b);
    }
    longer.fill_up();
    int slow = 0;
    for (int i = 0; i < longer.count; i += together)
        slow += encode_four<one_row>(string, start, maxbits, codes, longer.block + i);
    mostly_long = 2 * slow * together > group_blocks;
}

// Decode four codes of `budget` bits, with zeros above those, to strings of one row (`one_row`) or two. Decode two steps of each code
// here, and return whether some code has more.
template <bool one_row>
inline bool decode_four(const uint64_t* codes, int budget, uint64_t* string, const uint8_t* block, int& most_empty) {
    uint64_t low[together], high[together], code[together];
    uint32_t significant[together];
    int done[together], left[together];
    const auto append = [&](int l, uint64_t bits) __attribute__((always_inline)) {
        const int shift = done[l] & 63;  // beyond the string only in rare codes
        low[l] |= one_row || done[l] < 64 ? bits << shift : 0;
        if (!one_row) high[l] |= done[l] < 64 ? bits >> 1 >> (63 - shift) : bits << shift;
    };
    for (int l = 0; l < together; ++l) {
        const uint64_t bits = codes[block[l]];
        const int empty = __builtin_ctzll(bits | uint64_t(bits == 0));
        most_empty |= empty;
        code[l] = bits >> empty;
        low[l] = high[l] = 0;
        done[l] = 4 * empty;
        left[l] = budget - empty;
        significant[l] = 0;
    }
    bool unfinished = true;
    int steps = 0;
    for (; unfinished; ++steps) {
        unfinished = false;
        for (int l = 0; l < together; ++l) {
            const uint32_t entry = decode_table.entry[significant[l] | (code[l] & 255)];
            append(l, bits_in(entry));
            done[l] += string_bits_in(entry);
            left[l] -= length_in(entry);
            significant[l] = entry & significant_mask;
            code[l] >>= length_in(entry);
            unfinished |= significant[l] != all_significant && code[l] != 0;
        }
    }
    for (int l = 0; l < together; ++l) {
        cut_search(low[l], high[l], done[l], -left[l]);
        append(l, code[l]);
        string[block[l]] = low[l];
        if (!one_row) string[group_blocks + block[l]] = high[l];
    }
    return steps > 2;
}

// Set `rare` where a code starts with more zeros than any encoder writes; decode_block must decode it. Return whether there may be
// any such code. So few bits never give a string of more than two words. `tight`: two steps may read past the end, and a code may
// be all zeros.
template <bool one_row, bool tight>
inline bool decode_short(const uint64_t* codes, int budget, uint64_t* string, bool* rare, bool& mostly_long) {
    List longer;
    int most_empty = 0;
    for (int b = 0; mostly_long && b < group_blocks; ++b) longer.add_if(true, b);
    for (int b = 0; !mostly_long && b < group_blocks; ++b) {
        const int empty = tight ? __builtin_ctzll(codes[b] | uint64_t(codes[b] == 0)) : empty_planes(codes[b]);
        most_empty |= empty;
        const uint64_t code = codes[b] >> empty;
        const uint32_t first = decode_table.entry[code & 255];
        const uint64_t then = code >> length_in(first);
        const uint32_t second = decode_table.entry[(first & significant_mask) | (then & 255)];
        const uint64_t rest = then >> length_in(second);
        const int done = string_bits_in(first + second), skipped = 4 * empty & 63;  // `done` is 8 … 32
        const uint64_t bits = bits_in(first) | uint64_t(bits_in(second)) << string_bits_in(first) | rest << done;
        uint64_t low = bits << skipped;
        uint64_t high = one_row ? 0 : rest >> (64 - done) << skipped | bits >> 1 >> (63 - skipped);
        const bool open = (second & significant_mask) != all_significant;
        const int over = length_in(first + second) + empty - budget;
        if (tight && over > 0) cut_search(low, high, done + skipped, over);
        string[b] = low;
        if (!one_row) string[group_blocks + b] = high;
        longer.add_if(open & (rest != 0 || !tight), b);
    }
    longer.fill_up();
    int slow = 0;
    for (int i = 0; i < longer.count; i += together)
        slow += decode_four<one_row>(codes, budget, string, longer.block + i, most_empty);
    mostly_long = 2 * slow * together > group_blocks;
    for (int b = 0; most_empty > most_empty_planes && b < group_blocks; ++b)
        rare[b] |= (codes[b] != 0 || !tight) && empty_planes(codes[b]) > most_empty_planes;
    return most_empty > most_empty_planes;
}

// --- codes of any length -----------------------------------------------------------------------------------------------------

// The result of two table steps for the first nonempty planes.
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

// Encode any nonempty string, from bit `at` of `out` on, which must hold zeros. Bits beyond maxbits may follow, in up to two more
// words.
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

// Decode any code that starts with at most most_empty_planes zeros. `code` holds maxbits bits, then two words of zeros. `string`
// holds zeros, with an extra word.
inline void decode_planes(const uint64_t* code, int at, int maxbits, uint64_t* string, size_t stride, int planes) {
    const int empty = empty_planes(window(code, 1, at));
    int done = 4 * empty;
    uint32_t significant = 0;
    at += empty;
    while (significant != all_significant && at < maxbits && done < 4 * planes) {
        const uint32_t entry = decode_table.entry[significant | (window(code, 1, at) & 255)];
        uint64_t bits = bits_in(entry), none = 0;
        at += length_in(entry);
        cut_search(bits, none, string_bits_in(entry), at - maxbits);
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
