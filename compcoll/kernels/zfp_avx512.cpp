// ZFP tiles for AVX-512 (F, BW, CD, DQ, VL) with VBMI and GFNI: the same bytes as zfp.h, many blocks at a time.
//
//   zfp_avx512_tables.h       tables, computed from the plane codes of zfp.h
//   zfp_avx512_lanes.h        vectors with one lane per block
//   zfp_avx512_encode.h       values to strings of bits, one per lane
//   zfp_avx512_decode.h       strings to values; zfp_avx512_decode_flat.h for smooth data,
//                             zfp_avx512_decode_few.h for at most 16 bits
//   zfp_avx512_truncated.h    the values that a decoder will get, without decoding
//   zfp_avx512_stream.h       strings to and from the wire
//
// Encoders and decoders here have three sizes of strings: a double word, a word of 64 bits, several words.
#include "zfp_avx512_decode_few.h"
#include "zfp_avx512_decode_flat.h"
#include "zfp_avx512_stream.h"
#include "zfp_avx512_truncated.h"

namespace compcoll {
namespace {

constexpr int together = 4;  // independent groups, each step for all of them, which hides their latencies

template <class T> constexpr int run_values = together * group_values<T>;

template <class T>
using Groups = Group<T>[together];

template <class T>
STEP void to_coefficients(const T* values, Groups<T>& g) {
    UNROLL for (int k = 0; k < together; ++k) to_fixed_point<T>(values + k * group_values<T>, g[k]);
    UNROLL for (int k = 0; k < together; ++k) decorrelate<T>(g[k]);
    UNROLL for (int k = 0; k < together; ++k) skip_empty_planes<T>(g[k]);
}

// Decides how to process groups that were not the usual case: all groups together if there are two or more. After a run of only
// such groups, the usual case is skipped for a while.
struct Flatness {
    int runs = 0;

    bool expected() { return runs > 0 && runs-- > 0; }
    bool common(const bool (&usual)[together]) {
        const int flat = together - usual[0] - usual[1] - usual[2] - usual[3];
        if (flat == together) runs = 7;
        return flat >= 2;
    }
};

template <class T, bool accumulate>
STEP void write_groups(const Decoded<T> (&g)[together], const T* base, T* values) {
    UNROLL for (int k = 0; k < together; ++k) {
        const int first = k * group_values<T>;
        to_values<T, accumulate>(g[k].d, g[k].head, base + first, values + first);
    }
}

// maxbits ≤ 32, floats
struct ShortEncoder {
    int maxbits;
    Flatness flat{}, early{};  // early: few coefficients are significant where the bits run out
    Output out;
    Packing<float> packing;

    ShortEncoder(int maxbits, uint8_t* wire, size_t size) : maxbits(maxbits), out{wire, wire + size}, packing(maxbits) {}

    void operator()(const float* values, size_t) {
        Groups<float> g;
        V strings[together], end[together];
        bool usual[together];
        encode<false>(values, g, strings, end, usual);
        for (int k = 0; k < together; ++k) put(strings[k]);
    }

    enum class Cut { few_bits, usual, anywhere };

    // Also store the values that a decoder will get.
    void operator()(const float* values, size_t, float* decoded) {
        if (maxbits <= few_bits) both<Cut::few_bits>(values, decoded);
        else if (early.expected()) both<Cut::anywhere>(values, decoded);
        else both<Cut::usual>(values, decoded);
    }

    template <Cut where>
    [[gnu::noinline]] void both(const float* values, float* decoded) {
        Groups<float> g;
        V strings[together], end[together];
        bool usual[together];
        encode<true>(values, g, strings, end, usual);
        UNROLL for (int k = 0; k < together; ++k) put(strings[k]);
        Decoded<float> cut[together];
        if constexpr (where == Cut::few_bits) decode_few(strings, maxbits, cut);
        else if constexpr (where == Cut::anywhere) truncate_anywhere(g, maxbits, cut);
        else truncate_usual(g, end, usual, cut);
        write_groups<float, false>(cut, decoded, decoded);
    }

    // With copies, groups can stay in registers: the flat case takes addresses, which would force them into memory.
    template <bool copies>
    STEP void encode(const float* values, Groups<float>& g, V (&strings)[together], V (&end)[together], bool (&usual)[together]) {
        to_coefficients(values, g);
        if (flat.expected()) {
            for (bool& each : usual) each = false;
            return put_flat<together, copies>(g, strings);
        }
        encode_short_usual(g, maxbits, strings, end, usual);
        if (flat.common(usual)) return put_flat<together, copies>(g, strings);
        UNROLL for (int k = 0; k < together; ++k)
            if (!usual[k]) put_flat<1, copies>(&g[k], &strings[k]);
    }

    STEP void truncate_usual(const Groups<float>& g, const V (&end)[together], bool (&usual)[together],
                             Decoded<float> (&cut)[together]) {
        UNROLL for (int k = 0; k < together; ++k) usual[k] &= truncate(g[k], end[k], maxbits, cut[k]);
        if (usual[0] & usual[1] & usual[2] & usual[3]) [[likely]] return;
        early.common(usual);
        UNROLL for (int k = 0; k < together; ++k)
            if (!usual[k]) cut[k] = truncated_anywhere(g[k], maxbits);
    }

    template <int groups, bool copies>
    STEP void put_flat(const Group<float>* g, V* strings) {
        Strings<1> s[groups][2];
        if constexpr (copies) {
            Group<float> copy[groups];
            UNROLL for (int k = 0; k < groups; ++k) copy[k] = g[k];
            encode_flat<float, 1, groups>(copy, maxbits, s);
        } else {
            encode_flat<float, 1, groups>(g, maxbits, s);
        }
        UNROLL for (int k = 0; k < groups; ++k) strings[k] = narrow<0>(s[k][0].word[0], s[k][1].word[0]);
    }

    void put(V strings) {
        if (maxbits == 32) {
            out.put(_mm512_permutexvar_epi32(transposed_lanes(), strings), 64);
        } else if (maxbits == 16) {
            const V ordered = _mm512_permutexvar_epi32(transposed_lanes(), strings);
            out.put(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(ordered)), 32);
        } else {
            const auto wide = zero_extend<float>(strings);
            for (const V half : wide.at) out.put(packing(half), size_t(maxbits));
        }
    }

    void finish() { out.finish(); }
};

template <class T, int W>
STEP void encode_strings(const T* values, int maxbits, Flatness& flat, Strings<W> (&s)[together][halves<T>]) {
    Groups<T> g;
    to_coefficients(values, g);
    if (flat.expected()) return encode_flat<T, W, together>(g, maxbits, s);
    bool usual[together];
    for (int k = 0; k < together; ++k) usual[k] = encode_usual<T, W>(g[k], maxbits, s[k]);
    if (flat.common(usual)) return encode_flat<T, W, together>(g, maxbits, s);
    for (int k = 0; k < together; ++k)
        if (!usual[k]) encode_flat<T, W, 1>(&g[k], maxbits, &s[k]);
}

// maxbits ≤ 64
template <class T>
struct WordEncoder {
    int maxbits;
    Flatness flat{};
    Output out;
    Packing<T> packing;

    WordEncoder(int maxbits, uint8_t* wire, size_t size) : maxbits(maxbits), out{wire, wire + size}, packing(maxbits) {}

    void operator()(const T* values, size_t) {
        Strings<1> s[together][halves<T>];
        encode_strings<T, 1>(values, maxbits, flat, s);
        for (const auto& group : s)
            for (const auto& half : group)
                out.put(maxbits == 64 ? packing.whole_words(half.word[0]) : packing(half.word[0]), size_t(maxbits));
    }

    void finish() { out.finish(); }
};

// maxbits ≤ 64·W
template <class T, int W>
struct LongEncoder {
    int maxbits;
    Flatness flat{};
    BitWriter out;

    LongEncoder(int maxbits, uint8_t* wire, size_t) : maxbits(maxbits), out(wire) {}

    void operator()(const T* values, size_t blocks) {
        Strings<W> s[together][halves<T>];
        encode_strings<T, W>(values, maxbits, flat, s);
        uint64_t words[together * group_blocks<T>][W];
        for (int k = 0; k < together; ++k)
            for (int h = 0; h < halves<T>; ++h) store_words<T>(s[k][h], words[k * group_blocks<T> + 8 * h]);
        for (size_t b = 0; b < blocks; ++b) out.put(words[b], maxbits);
    }

    void finish() { out.finish(); }
};

size_t blocks_of(size_t n) { return (n + 3) / 4; }
size_t wire_bytes(size_t n, int maxbits) { return (blocks_of(n) * size_t(maxbits) + 63) / 64 * 8; }

// A run of which only n values exist: pad the last block as libzfp does, then add zeros, whose code is zeros.
template <class T>
void copy_padded(const T* values, size_t n, T (&padded)[run_values<T>]) {
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, values, n * sizeof(T));
    if (n % 4 == 0) return;
    T block[4];
    std::memcpy(block, padded + n / 4 * 4, sizeof block);
    zfp::pad_block(block, int(n % 4));
    std::memcpy(padded + n / 4 * 4, block, sizeof block);
}

template <class T, class Encoder, class... Decoded>
void encode_with(const T* values, size_t n, uint8_t* wire, int maxbits, Decoded*... decoded) {
    Encoder encoder(maxbits, wire, wire_bytes(n, maxbits));
    for (; n >= run_values<T>; n -= run_values<T>, values += run_values<T>) {
        encoder(values, run_values<T> / 4, decoded...);
        ((decoded += run_values<T>), ...);
    }
    if (n > 0) {
        T padded[run_values<T>];
        copy_padded(values, n, padded);
        encoder(padded, blocks_of(n), (static_cast<void>(decoded), padded)...);
        (std::memcpy(decoded, padded, n * sizeof(T)), ...);
    }
    encoder.finish();
}

template <class T>
void encode(const T* values, size_t n, uint8_t* wire, Config config) {
    const int maxbits = config.first;
    if constexpr (single<T>) {
        if (maxbits <= 32) encode_with<T, ShortEncoder>(values, n, wire, maxbits);
        else if (maxbits <= 64) encode_with<T, WordEncoder<T>>(values, n, wire, maxbits);
        else encode_with<T, LongEncoder<T, 2>>(values, n, wire, maxbits);
    } else {
        if (maxbits <= 64) encode_with<T, WordEncoder<T>>(values, n, wire, maxbits);
        else if (maxbits <= 128) encode_with<T, LongEncoder<T, 2>>(values, n, wire, maxbits);
        else encode_with<T, LongEncoder<T, 4>>(values, n, wire, maxbits);
    }
}

// --- decoding -----------------------------------------------------------------------------------------------------------------

// maxbits ≤ 32, floats
struct ShortDecoder {
    int maxbits;
    Flatness flat{};
    Input in;
    Unpacking<float> unpacking;

    ShortDecoder(int maxbits, const uint8_t* wire, size_t size) : maxbits(maxbits), in{wire, wire + size}, unpacking(maxbits) {}

    template <bool accumulate>
    void decode(const float* base, float* values, size_t) {
        V s[together];
        UNROLL for (int k = 0; k < together; ++k) s[k] = take();
        Decoded<float> g[together];
        bool usual[together];
        if (maxbits <= few_bits) {
            decode_few(s, maxbits, g);
        } else if (flat.expected()) {
            decode_short_flat<together>(s, maxbits, g);
        } else {
            decode_short_usual(s, maxbits, g, usual);
            if (flat.common(usual)) decode_short_flat<together>(s, maxbits, g);
            else
                for (int k = 0; k < together; ++k)
                    if (!usual[k]) decode_short_flat<1>(&s[k], maxbits, &g[k]);
        }
        write_groups<float, accumulate>(g, base, values);
    }

    V take() {
        if (maxbits == 32) return _mm512_permutexvar_epi32(transposed_lanes(), in.take(64));
        if (maxbits == 16)
            return _mm512_permutexvar_epi32(transposed_lanes(), _mm512_cvtepu16_epi32(_mm512_castsi512_si256(in.take(32))));
        const V first = unpacking(in.take(size_t(maxbits)));
        return narrow<0>(first, unpacking(in.take(size_t(maxbits))));
    }
};

template <class T, int W, bool accumulate>
STEP void decode_strings(const Strings<W> (&s)[together][halves<T>], int maxbits, Flatness& flat, const T* base, T* values) {
    Decoded<T> g[together];
    bool usual[together];
    if (flat.expected()) {
        decode_flat<T, W, together>(s, maxbits, g);
    } else {
        decode_usual<T, W>(s, maxbits, g, usual);
        if (flat.common(usual)) decode_flat<T, W, together>(s, maxbits, g);
        else
            for (int k = 0; k < together; ++k)
                if (!usual[k]) decode_flat<T, W, 1>(&s[k], maxbits, &g[k]);
    }
    write_groups<T, accumulate>(g, base, values);
}

// maxbits ≤ 64
template <class T>
struct WordDecoder {
    int maxbits;
    Flatness flat{};
    Input in;
    Unpacking<T> unpacking;

    WordDecoder(int maxbits, const uint8_t* wire, size_t size) : maxbits(maxbits), in{wire, wire + size}, unpacking(maxbits) {}

    template <bool accumulate>
    void decode(const T* base, T* values, size_t) {
        Strings<1> s[together][halves<T>];
        for (auto& group : s)
            for (auto& half : group) {
                const V packed = in.take(size_t(maxbits));
                half.word[0] = maxbits == 64 ? unpacking.whole_words(packed) : unpacking(packed);
            }
        decode_strings<T, 1, accumulate>(s, maxbits, flat, base, values);
    }
};

// maxbits ≤ 64·W
template <class T, int W>
struct LongDecoder {
    int maxbits;
    Flatness flat{};
    BitReader in;

    LongDecoder(int maxbits, const uint8_t* wire, size_t size) : maxbits(maxbits), in(wire, size) {}

    template <bool accumulate>
    void decode(const T* base, T* values, size_t blocks) {
        uint64_t words[together * group_blocks<T>][W] = {};
        for (size_t b = 0; b < blocks; ++b) in.take(words[b], W, maxbits);
        Strings<W> s[together][halves<T>];
        for (int k = 0; k < together; ++k)
            for (int h = 0; h < halves<T>; ++h) load_words<T>(words[k * group_blocks<T> + 8 * h], s[k][h]);
        decode_strings<T, W, accumulate>(s, maxbits, flat, base, values);
    }
};

template <class T, bool accumulate, class Decoder>
void decode_with(const uint8_t* wire, size_t n, const T* base, T* values, int maxbits) {
    Decoder decoder(maxbits, wire, wire_bytes(n, maxbits));
    for (; n >= run_values<T>; n -= run_values<T>, base += run_values<T>, values += run_values<T>)
        decoder.template decode<accumulate>(base, values, run_values<T> / 4);
    if (n > 0) {
        T padded[run_values<T>] = {};
        if (accumulate) std::memcpy(padded, base, n * sizeof(T));
        decoder.template decode<accumulate>(padded, padded, blocks_of(n));
        std::memcpy(values, padded, n * sizeof(T));
    }
}

template <class T, bool accumulate>
void decode_tile(const uint8_t* wire, size_t n, const T* base, T* values, int maxbits) {
    if constexpr (single<T>) {
        if (maxbits <= 32) decode_with<T, accumulate, ShortDecoder>(wire, n, base, values, maxbits);
        else if (maxbits <= 64) decode_with<T, accumulate, WordDecoder<T>>(wire, n, base, values, maxbits);
        else decode_with<T, accumulate, LongDecoder<T, 2>>(wire, n, base, values, maxbits);
    } else {
        if (maxbits <= 64) decode_with<T, accumulate, WordDecoder<T>>(wire, n, base, values, maxbits);
        else if (maxbits <= 128) decode_with<T, accumulate, LongDecoder<T, 2>>(wire, n, base, values, maxbits);
        else decode_with<T, accumulate, LongDecoder<T, 4>>(wire, n, base, values, maxbits);
    }
}

template <bool add, class T>
void decode(const uint8_t* wire, size_t n, const T* base, T* values, Config config) {
    decode_tile<T, add>(wire, n, base, values, config.first);
}

void encode_decoded(const float* values, size_t n, uint8_t* wire, float* decoded, Config config) {
    encode_with<float, ShortEncoder>(values, n, wire, config.first, decoded);
}

}  // namespace

const Kernels zfp_avx512 = {{encode<float>, decode<false, float>, decode<true, float>, encode_decoded, 32},
                            {encode<double>, decode<false, double>, decode<true, double>}};

}  // namespace compcoll
