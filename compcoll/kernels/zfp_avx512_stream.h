// ZFP on AVX-512: consecutive blocks of maxbits bits, to and from one block per lane.
#pragma once

#include "zfp_avx512_lanes.h"

namespace compcoll {
namespace {

STEP V quotient(V a, int b) {  // for numbers below 2^40
    return _mm512_cvttpd_epi64(_mm512_div_pd(_mm512_add_pd(_mm512_cvtepi64_pd(a), _mm512_set1_pd(0.5)), _mm512_set1_pd(b)));
}

STEP V lane_numbers() { return _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7); }
STEP V lowest_bits(int n) { return _mm512_set1_epi64(n >= 64 ? -1 : int64_t((uint64_t(1) << n) - 1)); }
STEP __mmask64 first_bytes(size_t n) { return n >= 64 ? ~__mmask64(0) : (__mmask64(1) << n) - 1; }

// Packs eight strings of up to 64 bits, in the lane order of the tables, into maxbits bytes. A word of the result takes its bits
// from a few consecutive strings, with one permutation and one shift each.
template <class T>
class Packing {
public:
    explicit Packing(int maxbits)
        : kept_(lowest_bits(maxbits)), lane_of_block_(lane_of_block<T>()), terms_((maxbits + 62) / maxbits + 1) {
        const V start = _mm512_slli_epi64(lane_numbers(), 6);
        const V first = quotient(start, maxbits);
        for (int t = 0; t < terms_; ++t) {
            const V block = _mm512_add_epi64(first, _mm512_set1_epi64(t));
            source_[t] = _mm512_permutexvar_epi64(block, lane_of_block_);
            const V at = _mm512_sub_epi64(_mm512_mullo_epi64(block, _mm512_set1_epi64(maxbits)), start);
            shift_[t] = t == 0 ? _mm512_sub_epi64(V(), at) : at;
            in_range_[t] = _mm512_cmplt_epu64_mask(block, _mm512_set1_epi64(8));
        }
    }

    V operator()(V strings) const {
        strings = _mm512_and_si512(strings, kept_);
        V packed = _mm512_srlv_epi64(_mm512_permutexvar_epi64(source_[0], strings), shift_[0]);
        for (int t = 1; t < terms_; ++t) {
            const V block = _mm512_maskz_permutexvar_epi64(in_range_[t], source_[t], strings);
            packed = _mm512_or_si512(packed, _mm512_sllv_epi64(block, shift_[t]));
        }
        return packed;
    }

    V whole_words(V strings) const { return _mm512_permutexvar_epi64(lane_of_block_, strings); }

private:
    V source_[8], shift_[8];
    __mmask8 in_range_[8];
    V kept_, lane_of_block_;
    int terms_;
};

// The inverse: maxbits bytes become eight strings, with zeros above maxbits.
template <class T>
class Unpacking {
public:
    explicit Unpacking(int maxbits) : kept_(lowest_bits(maxbits)) {
        const V at = _mm512_mullo_epi64(block_of_lane<T>(), _mm512_set1_epi64(maxbits));
        word_ = _mm512_srli_epi64(at, 6);
        next_word_ = _mm512_add_epi64(word_, _mm512_set1_epi64(1));
        down_ = _mm512_and_si512(at, _mm512_set1_epi64(63));
        up_ = _mm512_sub_epi64(_mm512_set1_epi64(64), down_);
    }

    V operator()(V packed) const {
        const V low = _mm512_srlv_epi64(_mm512_permutexvar_epi64(word_, packed), down_);
        const V high = _mm512_sllv_epi64(_mm512_permutexvar_epi64(next_word_, packed), up_);
        return ternary<either_and_c>(low, high, kept_);
    }

    V whole_words(V packed) const { return _mm512_permutexvar_epi64(word_, packed); }

private:
    V word_, next_word_, down_, up_, kept_;
};

// Loads registers of which only some bytes are used, without reading beyond the end.
struct Input {
    const uint8_t* at;
    const uint8_t* end;

    V take(size_t count) {
        const size_t room = size_t(end - at);
        const V v = room >= 64 ? load(at) : _mm512_maskz_loadu_epi8(first_bytes(room), at);
        at += count < room ? count : room;
        return v;
    }
};

// Stores registers of which only some bytes are valid. The next store overwrites the rest, and nothing is written beyond the end.
struct Output {
    uint8_t* at;
    uint8_t* end;

    void put(V v, size_t count) {
        const size_t room = size_t(end - at);
        if (room >= 64) store(at, v);
        else _mm512_mask_storeu_epi8(at, first_bytes(count < room ? count : room), v);
        at += count < room ? count : room;
    }

    void finish() { std::memset(at, 0, size_t(end - at)); }
};

// Strings of W words for eight blocks, to and from memory in block order.
template <class T, int W>
STEP V word_places() {
    return _mm512_slli_epi64(_mm512_mullo_epi64(block_of_lane<T>(), _mm512_set1_epi64(W)), 3);
}

template <class T, int W>
STEP void store_words(const Strings<W>& s, uint64_t* words) {
    if constexpr (W == 2) {  // word w of the block in lane l becomes lane 2·block + w
        const V block = _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), later = _mm512_add_epi64(block, _mm512_set1_epi64(4));
        const V second = _mm512_setr_epi64(0, 8, 0, 8, 0, 8, 0, 8);
        const auto source = [&](V b) { return _mm512_add_epi64(_mm512_permutexvar_epi64(b, lane_of_block<T>()), second); };
        store(words, _mm512_permutex2var_epi64(s.word[0], source(block), s.word[1]));
        store(words + 8, _mm512_permutex2var_epi64(s.word[0], source(later), s.word[1]));
    } else {
        for (int w = 0; w < W; ++w) _mm512_i64scatter_epi64(words + w, word_places<T, W>(), s.word[w], 1);
    }
}

template <class T, int W>
STEP void load_words(const uint64_t* words, Strings<W>& s) {
    if constexpr (W == 2) {
        const V first = _mm512_slli_epi64(block_of_lane<T>(), 1), second = _mm512_add_epi64(first, _mm512_set1_epi64(1));
        const V a = load(words), b = load(words + 8);
        s.word[0] = _mm512_permutex2var_epi64(a, first, b), s.word[1] = _mm512_permutex2var_epi64(a, second, b);
    } else {
        for (int w = 0; w < W; ++w) s.word[w] = _mm512_i64gather_epi64(word_places<T, W>(), words + w, 1);
    }
}

// Writes strings of bits for blocks longer than a word.
class BitWriter {
public:
    explicit BitWriter(uint8_t* at) : at_(at) {}

    void put(const uint64_t* words, int count) {
        for (; count >= 64; count -= 64) put_bits(*words++, 64);
        if (count > 0) put_bits(*words & ((uint64_t(1) << count) - 1), count);
    }

    void finish() {
        if (filled_ > 0) std::memcpy(at_, &word_, 8);
    }

private:
    void put_bits(uint64_t bits, int count) {
        word_ |= bits << filled_;
        filled_ += count;
        if (filled_ < 64) return;
        std::memcpy(at_, &word_, 8);
        at_ += 8;
        filled_ -= 64;
        word_ = filled_ > 0 ? bits >> (count - filled_) : 0;
    }

    uint8_t* at_;
    uint64_t word_ = 0;
    int filled_ = 0;
};

class BitReader {
public:
    BitReader(const uint8_t* at, size_t bytes) : at_(at), end_(at + bytes) {}

    // `count` bits, then zeros
    void take(uint64_t* words, int size, int count) {
        for (int w = 0; w < size; ++w, count -= 64) words[w] = count >= 64 ? bits(64) : count > 0 ? bits(count) : 0;
    }

private:
    uint64_t bits(int count) {
        uint64_t result = word_;
        if (count > left_) {
            const uint64_t next = next_word();
            result |= next << left_;
            const int used = count - left_;
            word_ = used < 64 ? next >> used : 0;
            left_ = 64 - used;
        } else {
            word_ = count < 64 ? word_ >> count : 0;
            left_ -= count;
        }
        return count < 64 ? result & ((uint64_t(1) << count) - 1) : result;
    }

    uint64_t next_word() {
        uint64_t word = 0;
        if (at_ < end_) std::memcpy(&word, at_, 8), at_ += 8;
        return word;
    }

    const uint8_t* at_;
    const uint8_t* end_;
    uint64_t word_ = 0;  // zeros above `left_` bits
    int left_ = 0;
};

}  // namespace
}  // namespace compcoll
