// The passes of szp_passes.h. Each instruction set compiles them. Everything here is in an unnamed namespace, so that the linker never
// mixes functions of two sets.
#pragma once

#include <utility>

#include "szp_passes.h"
#include "unaligned.h"
#include "vectors.h"

namespace compcoll {
namespace {

// ---- vectors of integers, and of as many values in two halves ----

using Words = VectorOf<float>::Bits;
using SignedWords = VectorOf<float>::Signed;
using Doubles = VectorOf<double>::Values;
typedef float Floats __attribute__((vector_size(vector_nbytes / 2)));
typedef int32_t Integers __attribute__((vector_size(vector_nbytes / 2)));
constexpr size_t step_length = lanes<float>, half_length = lanes<double>;

template <class T>
Doubles load_doubles(const T* values) {
    if constexpr (sizeof(T) == 8) return load<Doubles>(values);
    else return __builtin_convertvector(load<Floats>(values), Doubles);
}

template <class T>
void store_doubles(T* values, Doubles doubles) {
    if constexpr (sizeof(T) == 8) store(values, doubles);
    else store(values, __builtin_convertvector(doubles, Floats));
}

inline Doubles to_doubles(Integers integers) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_pd(bits_as<__m256i>(integers));  // g++ 12 would convert four at a time
#else
    return __builtin_convertvector(integers, Doubles);
#endif
}

// The lower halves of the 64-bit lanes of two vectors.
inline Words lower_halves(Doubles first, Doubles second) {
    const auto a = bits_as<Words>(first), b = bits_as<Words>(second);
#if defined(__AVX512F__)
    return __builtin_shuffle(a, b, Words{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30});
#elif defined(__AVX__)
    return __builtin_shuffle(a, b, Words{0, 2, 4, 6, 8, 10, 12, 14});
#else
    return __builtin_shuffle(a, b, Words{0, 2, 4, 6});
#endif
}

// The lanes moved up by `count`; the last lanes of `before` fill the first ones.
template <int count>
Words moved_up(Words before, Words words) {
#if defined(__AVX512F__)
    return bits_as<Words>(_mm512_alignr_epi32(bits_as<__m512i>(words), bits_as<__m512i>(before), 16 - count));
#else
    Words lane = {};
    for (uint32_t i = 0; i < step_length; ++i) lane[i] = static_cast<uint32_t>(step_length) - count + i;
    return __builtin_shuffle(before, words, lane);
#endif
}

inline Words last_lane(Words words) { return __builtin_shuffle(words, Words{} + static_cast<uint32_t>(step_length - 1)); }

// Each lane plus all lanes before it.
inline Words prefix_sums(Words words) {
    words += moved_up<1>(Words{}, words);
    words += moved_up<2>(Words{}, words);
    if constexpr (step_length > 4) words += moved_up<4>(Words{}, words);
    if constexpr (step_length > 8) words += moved_up<8>(Words{}, words);
    return words;
}

// ---- the width of codes: in `d ^ (d + d)` the highest bit is where the sign of d begins ----

inline int width_of(Words changes) {
    uint32_t any = 0;
    for (size_t lane = 0; lane < step_length; ++lane) any |= changes[lane];
    return any == 0 ? 0 : 32 - leading_zeros(any);
}

// ---- full blocks ----

// Store the differences of the integers of a block's values, or add them to others, whose width it then returns; -1 if a magnitude is
// above the limit.
template <bool add, class T>
int round_block(const T* values, double steps_per_unit, T limit, uint32_t* differences) {
    using Magnitudes = typename VectorOf<T>::Signed;
    Magnitudes most = {};
    Words changes = {}, before = Words{} + szp_integer(static_cast<double>(load<T>(values)), steps_per_unit);
    for (size_t i = 0; i < szp_block; i += step_length) {
        const Doubles lower = load_doubles(values + i) * steps_per_unit + 0x1.8p52;
        const Doubles upper = load_doubles(values + i + half_length) * steps_per_unit + 0x1.8p52;
        const Words integers = lower_halves(lower, upper);
        Words difference = integers - moved_up<1>(before, integers);
        before = integers;
        if (add) difference += load<Words>(differences + i);
        changes |= difference ^ (difference + difference);
        store(differences + i, difference);
        for (size_t k = 0; k < step_length; k += lanes<T>) {
            const auto magnitude = bits_as<Magnitudes>(load<typename VectorOf<T>::Bits>(values + i + k) & all_but_sign<T>);
            most = magnitude > most ? magnitude : most;
        }
    }
    SignedOf<T> largest = 0;
    for (size_t lane = 0; lane < lanes<T>; ++lane) largest = most[lane] > largest ? most[lane] : largest;
    return largest <= magnitude_bits(limit) ? width_of(changes) : -1;
}

template <int width>
constexpr uint32_t low_bits = width == 32 ? ~0u : (1u << width) - 1;

template <int width>
void pack_block(const uint32_t* differences, uint8_t* words) {
    for (size_t lane = 0; lane < szp_lanes; lane += step_length) {
        Words word = {};
#pragma GCC unroll 32
        for (int row = 0; row < szp_rows; ++row) {
            const int shift = row * width % 32, end = shift + width;
            const Words code = load<Words>(differences + row * szp_lanes + lane) & low_bits<width>;
            word = shift == 0 ? code : word | code << shift;
            if (end < 32) continue;
            store(words + row * width / 32 * szp_row_nbytes + szp_word_nbytes * lane, word);
            if (end > 32) word = code >> (32 - shift);
        }
    }
}

// Store the differences of a block, or add them to others. Return the width of the sums; 0 without `add`.
template <bool add, int width>
int unpack_block(const uint8_t* words, uint32_t* differences) {
    Words changes = {};
    for (size_t lane = 0; lane < szp_lanes; lane += step_length) {
        Words word = {};
#pragma GCC unroll 32
        for (int row = 0; row < szp_rows; ++row) {
            const int shift = row * width % 32, end = shift + width;
            const uint8_t* at = words + row * width / 32 * szp_row_nbytes + szp_word_nbytes * lane;
            Words difference = {};
            if constexpr (width > 0) {
                if (shift == 0) word = load<Words>(at);
                // Move the code to the upper bits, then down with its sign.
                Words code = word << (end <= 32 ? 32 - end : 0);
                if (end > 32) {
                    const Words next = load<Words>(at + szp_row_nbytes);
                    code = next << (64 - end) | (word >> shift) << (32 - width);
                    word = next;
                }
                difference = bits_as<Words>(bits_as<SignedWords>(code) >> (32 - width));
            }
            if constexpr (add) {
                difference += load<Words>(differences + row * szp_lanes + lane);
                changes |= difference ^ (difference + difference);
            }
            store(differences + row * szp_lanes + lane, difference);
        }
    }
    return width_of(changes);
}

// The values of a block's integers. `narrow`: these and the step are exact in T, and fewer instructions do.
template <bool narrow, class T>
void restore_block(const uint32_t* differences, uint32_t first, double step, T* values) {
    Words carry = Words{} + first;
    for (size_t i = 0; i < szp_block; i += step_length) {
        const Words sums = prefix_sums(load<Words>(differences + i)), integers = sums + carry;
        carry += last_lane(sums);
        if constexpr (narrow) {
            const auto exact = __builtin_convertvector(bits_as<SignedWords>(integers), VectorOf<float>::Values);
            store(values + i, exact * static_cast<float>(step));
        } else {
            struct Halves { Integers lower, upper; };
            const auto halves = bits_as<Halves>(integers);
            store_doubles(values + i, to_doubles(halves.lower) * step);
            store_doubles(values + i + half_length, to_doubles(halves.upper) * step);
        }
    }
}

struct Packings {
    void (*pack[szp_widest + 1])(const uint32_t* differences, uint8_t* words);
    int (*unpack[szp_widest + 1])(const uint8_t* words, uint32_t* differences);
    int (*unpack_add[szp_widest + 1])(const uint8_t* words, uint32_t* differences);
};

template <int... width>
constexpr Packings packings_of(std::integer_sequence<int, width...>) {
    return {{pack_block<width>...}, {unpack_block<false, width>...}, {unpack_block<true, width>...}};
}

constexpr Packings by_width = packings_of(std::make_integer_sequence<int, szp_widest + 1>());

// ---- sums of blocks ----

// The sum of the terms of one block: integers if all terms are, else values.
template <class T>
class BlockSum {
public:
    explicit BlockSum(const SzpTerms<T>& terms)
        : terms_(terms), steps_per_unit_(terms.scale / terms.step),
          exact_step_(sizeof(T) == 4 && terms.step >= 0x1p-126 && terms.step < 0x1p128) {}

    // Add the terms of block b, which has m values and is the next of each wire.
    void compute(size_t b, int m) {
        m_ = m;
        is_raw_ = false;
        for (size_t i = 0; i < terms_.count; ++i) is_raw_ = is_raw_ || width_in(i, b) == szp_raw;
        const bool array_fits = add_integers(b, terms_.add != nullptr);
        if (!array_fits) add_integers(b, false);
        is_raw_ = is_raw_ || !array_fits;
        if (is_raw_) add_values(b, !array_fits);
        for (size_t i = 0; i < terms_.count; ++i) terms_.wires[i].block += szp_block_nbytes(width_in(i, b), m, sizeof(T));
    }

    int width() const { return is_raw_ ? szp_raw : width_; }
    uint32_t first() const { return is_raw_ ? 0 : first_; }

    void write(uint8_t* block) const {
        if (is_raw_) return store_values(reinterpret_cast<uint8_t*>(block));
        if (m_ == szp_block) return by_width.pack[width_](differences_, block);
        uint8_t packed[szp_rows * szp_row_nbytes];
        by_width.pack[width_](differences_, packed);
        std::memcpy(block, packed, static_cast<size_t>(szp_block_nbytes(width_, m_, sizeof(T))));
    }

    void store_to(T* values) const {
        if (is_raw_) return store_values(reinterpret_cast<uint8_t*>(values));
        if (m_ == szp_block) return restore(values);
        T padded[szp_block];
        restore(padded);
        std::memcpy(values, padded, static_cast<size_t>(m_) * sizeof(T));
    }

private:
    int width_in(size_t wire, size_t b) const { return terms_.wires[wire].widths[b]; }
    uint32_t first_in(size_t wire, size_t b) const { return load<uint32_t>(terms_.wires[wire].firsts + 4 * b); }

    // The words of a packed block, completed by zeros.
    const uint8_t* packed(const uint8_t* block, int width, uint8_t* complete) const {
        if (m_ == szp_block) return block;
        const auto nbytes = static_cast<size_t>(szp_block_nbytes(width, m_, sizeof(T)));
        std::memcpy(complete, block, nbytes);
        std::memset(complete + nbytes, 0, static_cast<size_t>(width) * szp_row_nbytes - nbytes);
        return complete;
    }

    // Add the wires that are integers here; with_array: the array, too. Return whether the array's values can be integers.
    bool add_integers(size_t b, bool with_array) {
        uint8_t complete[szp_rows * szp_row_nbytes];
        bool some = false;
        first_ = 0;
        width_ = 0;
        for (size_t i = 0; i < terms_.count; ++i) {
            const int width = width_in(i, b);
            if (width == szp_raw) continue;
            const auto& unpack = some ? by_width.unpack_add : by_width.unpack;
            const int sum = unpack[width](packed(terms_.wires[i].block, width, complete), differences_);
            first_ += first_in(i, b);
            width_ = some ? sum : width;
            some = true;
        }
        if (with_array) {
            T padded[szp_block];
            const T* values = array(b, padded);
            const int sum = some ? round_block<true>(values, steps_per_unit_, terms_.limit, differences_)
                                 : round_block<false>(values, steps_per_unit_, terms_.limit, differences_);
            if (sum < 0) return false;
            first_ += szp_integer(static_cast<double>(load<T>(values)), steps_per_unit_);
            width_ = sum;
        }
        has_integers_ = some || with_array;
        return true;
    }

    // The array's values in block b; a short block is continued with its last value.
    const T* array(size_t b, T* padded) const {
        const T* values = terms_.add + b * szp_block;
        if (m_ == szp_block) return values;
        std::memcpy(padded, values, static_cast<size_t>(m_) * sizeof(T));
        for (int i = m_; i < szp_block; ++i) padded[i] = padded[m_ - 1];
        return padded;
    }

    // Add in float64: the sum of all integers, the array unless it is among them, and the raw blocks in their order.
    void add_values(size_t b, bool with_array) {
        uint32_t integer = first_;
        for (int i = 0; i < m_; ++i) {
            if (has_integers_) integer += differences_[i];
            values_[i] = has_integers_ ? static_cast<int32_t>(integer) * terms_.step : -0.0;
        }
        if (with_array)
            for (int i = 0; i < m_; ++i) values_[i] += static_cast<double>(load<T>(terms_.add + b * szp_block + i)) * terms_.scale;
        for (size_t k = 0; k < terms_.count; ++k) {
            if (width_in(k, b) != szp_raw) continue;
            const uint8_t* block = terms_.wires[k].block;
            for (int i = 0; i < m_; ++i) values_[i] += static_cast<double>(load<T>(block + static_cast<size_t>(i) * sizeof(T)));
        }
    }

    void store_values(uint8_t* to) const {
        for (int i = 0; i < m_; ++i) store(to + static_cast<size_t>(i) * sizeof(T), szp_raw_value<T>(values_[i]));
    }

    void restore(T* values) const {
        if constexpr (sizeof(T) == 4) {
            // No integer is further from 0 than the first one and 512 differences together.
            const int64_t first = static_cast<int32_t>(first_), most = (first < 0 ? -first : first) + (int64_t(szp_block) << width_ >> 1);
            if (exact_step_ && most <= 1 << 24) return restore_block<true>(differences_, first_, terms_.step, values);
        }
        restore_block<false>(differences_, first_, terms_.step, values);
    }

    const SzpTerms<T>& terms_;
    double steps_per_unit_;
    bool exact_step_, is_raw_, has_integers_;
    int m_, width_;
    uint32_t first_;
    alignas(64) uint32_t differences_[szp_block];
    double values_[szp_block];
};

// Call use(sum, b, m) for each block.
template <class T, class Use>
void for_each_sum(const SzpTerms<T>& terms, Use use) {
    BlockSum<T> sum(terms);
    for (size_t begin = 0, b = 0; begin < terms.n; begin += szp_block, ++b) {
        const int m = static_cast<int>(terms.n - begin < szp_block ? terms.n - begin : szp_block);
        sum.compute(b, m);
        use(sum, b, m);
    }
}

template <class T>
size_t encode(const SzpTerms<T>& terms, uint8_t* wire) {
    const size_t blocks = (terms.n + szp_block - 1) / szp_block;
    uint8_t *firsts = wire + szp_header_nbytes, *widths = firsts + 4 * blocks;
    uint8_t* block = wire + szp_front_nbytes(static_cast<int64_t>(blocks));
    for (uint8_t* pad = widths + blocks; pad < block; ++pad) *pad = 0;
    for_each_sum(terms, [&](const BlockSum<T>& sum, size_t b, int m) {
        store(firsts + 4 * b, sum.first());
        widths[b] = static_cast<uint8_t>(sum.width());
        sum.write(block);
        block += szp_block_nbytes(sum.width(), m, sizeof(T));
    });
    return static_cast<size_t>(block - wire);
}

template <class T>
void decode(const SzpTerms<T>& terms, T* values) {
    for_each_sum(terms, [&](const BlockSum<T>& sum, size_t b, int) { sum.store_to(values + b * szp_block); });
}

template <class T>
constexpr SzpFunctions<T> functions_of = {encode<T>, decode<T>};

constexpr SzpPasses these_szp = {functions_of<float>, functions_of<double>};

}  // namespace
}  // namespace compcoll
