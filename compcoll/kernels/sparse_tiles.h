// The passes of sparse_passes.h. Each instruction set compiles them. Everything here is in an unnamed namespace, so that the linker
// never mixes functions of two sets.
#pragma once

#include "sparse.h"
#include "sparse_passes.h"
#include "unaligned.h"
#include "vectors.h"

namespace compcoll {
namespace {

template <class T>
using Values = typename VectorOf<T>::Values;
template <class T>
using Lanes = typename VectorOf<T>::Signed;
// Values per iteration of a loop, in as many vectors as needed.
template <class T>
constexpr size_t stride = moment_lanes<T>;
template <class T>
constexpr size_t rows = stride<T> / lanes<T>;

// Prefetch the stride this far ahead: the processor's own prefetching stops at page boundaries.
template <class T>
void fetch_ahead(const T* values) {
    prefetch(values, 8192 / sizeof(T), stride<T>);
}

// ---- moments ----

template <class T>
struct LaneSums {
    Values<T> sum[rows<T>], absolute[rows<T>], square[rows<T>];
    Lanes<T> largest[rows<T>];

    LaneSums() : sum(), absolute(), square(), largest() {}

    void take(const T* values) {
        for (size_t r = 0; r < rows<T>; ++r) {
            const auto bits = load<Lanes<T>>(values + r * lanes<T>);
            auto magnitude = bits & SignedOf<T>(all_but_sign<T>);
            const auto finite = magnitude < infinity_bits<T>;  // all ones where true
            magnitude &= finite;
            const auto value = bits_as<Values<T>>(bits & finite);
            sum[r] += value;
            absolute[r] += bits_as<Values<T>>(magnitude);
            square[r] += value * value;
            largest[r] = magnitude > largest[r] ? magnitude : largest[r];
        }
    }
};

template <class T>
double added_up(const Values<T>* of_rows, double total) {
    for (size_t r = 0; r < rows<T>; ++r)
        for (size_t lane = 0; lane < lanes<T>; ++lane) total += static_cast<double>(of_rows[r][lane]);
    return total;
}

template <class T>
Moments moments(const T* values, size_t n) {
    Moments all{0, 0, 0, 0};
    SignedOf<T> largest = 0;
    constexpr size_t block = moment_values<T>;
    for (size_t begin = 0; begin < n; begin += block) {
        const size_t end = begin + block < n ? begin + block : n;
        LaneSums<T> sums;
        size_t i = begin;
        for (; i + stride<T> <= end; i += stride<T>) sums.take(values + i);
        if (i < end) {
            T rest[stride<T>] = {};
            std::memcpy(rest, values + i, (end - i) * sizeof(T));
            sums.take(rest);
        }
        all.sum = added_up<T>(sums.sum, all.sum);
        all.absolute = added_up<T>(sums.absolute, all.absolute);
        all.square = added_up<T>(sums.square, all.square);
        for (size_t r = 0; r < rows<T>; ++r)
            for (size_t lane = 0; lane < lanes<T>; ++lane)
                largest = sums.largest[r][lane] > largest ? sums.largest[r][lane] : largest;
    }
    all.largest = static_cast<double>(bits_as<T>(largest));
    return all;
}

// ---- conditions: on one value, on a vector of values (all ones where true), and a prefetch of the values needed later ----

template <class T>
struct Above {
    const T* values;
    SignedOf<T> threshold;

    COMPCOLL_HD bool one(size_t i) const { return is_above(load<T>(values + i), threshold); }
    COMPCOLL_HD Lanes<T> some(size_t i) const {
        return (load<Lanes<T>>(values + i) & SignedOf<T>(all_but_sign<T>)) > threshold;
    }
    void fetch(size_t i) const { fetch_ahead(values + i); }
};

template <class T>
struct Unambiguous {
    const T* values;
    const T* variances;
    SignedOf<T> threshold;
    T alpha;

    COMPCOLL_HD bool one(size_t i) const {
        return is_unambiguous(load<T>(values + i), load<T>(variances + i), threshold, alpha);
    }
    COMPCOLL_HD Lanes<T> some(size_t i) const {
        const auto r = load<Values<T>>(values + i), v = load<Values<T>>(variances + i);
        const auto magnitude = bits_as<Lanes<T>>(r) & SignedOf<T>(all_but_sign<T>);
        return (magnitude > threshold) & ((magnitude >= infinity_bits<T>) | (r * r > alpha * v));
    }
    void fetch(size_t i) const {
        fetch_ahead(values + i);
        fetch_ahead(variances + i);
    }
};

// ---- count and compaction ----

template <class T, class Condition>
size_t count_of(size_t n, const Condition& condition) {
    size_t total = 0, i = 0;
    constexpr size_t block = size_t(1) << 20;  // no lane overflows
    while (i + stride<T> <= n) {
        Lanes<T> counts[rows<T>] = {};
        for (const size_t end = i + block < n ? i + block : n; i + stride<T> <= end; i += stride<T>)
            for (size_t r = 0; r < rows<T>; ++r) counts[r] -= condition.some(i + r * lanes<T>);
        for (size_t r = 0; r < rows<T>; ++r)
            for (size_t lane = 0; lane < lanes<T>; ++lane) total += static_cast<size_t>(counts[r][lane]);
    }
    for (; i < n; ++i) total += condition.one(i);
    return total;
}

// Write the indices of values in a stride that meet the condition; `found` has room for a stride and a vector.
template <class T, class Condition>
size_t found_in_stride(size_t i, [[maybe_unused]] const Condition& condition, [[maybe_unused]] const Lanes<T>* masks, uint32_t* found) {
    size_t count = 0;
#if defined(__AVX512F__)
    for (size_t r = 0; r < rows<T>; ++r) {
        const auto first = static_cast<int>(i + r * lanes<T>);
        const uint32_t mask = sign_bits<T>(masks[r]);
        if constexpr (sizeof(T) == 4) {
            const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            const __m512i packed = _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), _mm512_add_epi32(numbers, _mm512_set1_epi32(first)));
            _mm512_storeu_si512(found + count, packed);
        } else {
            const __m256i numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            const __m256i packed = _mm256_maskz_compress_epi32(static_cast<__mmask8>(mask), _mm256_add_epi32(numbers, _mm256_set1_epi32(first)));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(found + count), packed);
        }
        count += static_cast<size_t>(__builtin_popcount(mask));
    }
#else
    for (size_t j = i; j < i + stride<T>; ++j) {
        found[count] = static_cast<uint32_t>(j);
        count += condition.one(j);
    }
#endif
    return count;
}

template <class T, class Condition>
size_t compact_if(size_t n, const Condition& condition, uint32_t* indices, size_t capacity) {
    uint32_t found[stride<T> + 16];
    size_t total = 0, i = 0;
    const auto keep = [&](size_t count) {
        if (total < capacity) std::memcpy(indices + total, found, (count < capacity - total ? count : capacity - total) * 4);
        total += count;
    };
    const auto look_at = [&](size_t begin) {
        Lanes<T> masks[rows<T>];
        for (size_t r = 0; r < rows<T>; ++r) masks[r] = condition.some(begin + r * lanes<T>);
        if (total + stride<T> + 16 <= capacity) total += found_in_stride<T>(begin, condition, masks, indices + total);
        else keep(found_in_stride<T>(begin, condition, masks, found));
    };
    const auto look_at_one = [&] {
        found[0] = static_cast<uint32_t>(i);
        if (condition.one(i)) keep(1);
    };
    for (const size_t first = before_line(condition.values, n); i < first; ++i) look_at_one();
    // First find the strides with such values, without unpredictable branches. Then process these, whose values are still in a near
    // cache.
    constexpr size_t most = 64;
    while (i + stride<T> <= n) {
        const size_t left = (n - i) / stride<T>, strides = left < most ? left : most;
        uint64_t some = 0;
        for (size_t s = 0; s < strides; ++s) {
            Lanes<T> either = {};
            condition.fetch(i + s * stride<T>);
            for (size_t r = 0; r < rows<T>; ++r) either |= condition.some(i + s * stride<T> + r * lanes<T>);
            some |= static_cast<uint64_t>(sign_bits<T>(either) != 0) << s;
        }
        for (; some != 0; some &= some - 1) look_at(i + static_cast<size_t>(__builtin_ctzll(some)) * stride<T>);
        i += strides * stride<T>;
    }
    for (; i < n; ++i) look_at_one();
    return total;
}

template <class T>
size_t count(const T* values, size_t n, SignedOf<T> threshold) {
    return count_of<T>(n, Above<T>{values, threshold});
}

template <class T>
size_t compact(const T* values, size_t n, SignedOf<T> threshold, uint32_t* indices, size_t capacity) {
    return compact_if<T>(n, Above<T>{values, threshold}, indices, capacity);
}

template <class T>
size_t unambiguous(const T* values, const T* variances, size_t n, T alpha, SignedOf<T> threshold,
                   uint32_t* indices, size_t capacity) {
    return compact_if<T>(n, Unambiguous<T>{values, variances, threshold, alpha}, indices, capacity);
}

template <class T>
constexpr SparseFunctions<T> functions_of = {moments<T>, count<T>, compact<T>, unambiguous<T>};

constexpr SparsePasses these_sparse = {functions_of<float>, functions_of<double>};

}  // namespace
}  // namespace compcoll
