// Codecs whose integers are summed without decoding, on a GPU. They use these `Parameters`:
//
//   survey     add · scale + residual → out: bits of each block's largest magnitude
//   encode     the same sum, shared scales in wires[0] → out: integers; residual: what encoding loses
//   decode     wires[0]: shared scales, wires[1]: integers → out
//   combine    add (or null) and wires → out, and decoded unless null; first: 0 adds, 1 takes the maximum
//
// with blocks of `second` values, `first` levels or ranks, and integers of `variant` bytes or votes of `variant` bits.
#pragma once

#include "device_blocks.h"
#include "integer_quantizer.h"

namespace compcoll {

template <class T>
__device__ __forceinline__ void load_fed(const Parameters& p, const Values& at, T (&x)[8]) {
    at.load(p.add, p.add_storage, x);
    multiply(p, x);
    if (p.residual != nullptr) add_loaded(residual_at<T>(p, at), x);
}

template <class T>
__device__ __forceinline__ void survey_blocks(const Parameters& p) {
    Team team(p.team);
    for (int64_t b = team.index(); b < p.blocks; b += team.count()) {
        const int64_t begin = b * p.second;
        const int length = p.n - begin < p.second ? static_cast<int>(p.n - begin) : p.second;
        SignedOf<T> maxima[1] = {0};
        COMPCOLL_ROLLED for (int at = 8 * team.rank; at < length; at += 8 * team.size) {
            T x[8];
            load_fed(p, Values{begin + at, length - at < 8 ? length - at : 8}, x);
            survey_magnitudes(x, maxima);
        }
        team.reduce(maxima, Larger());
        if (team.rank == 0) store_value(p.out + b * static_cast<int64_t>(sizeof(T)), bits_as<T>(maxima[0]));
    }
}

template <class T>
__device__ __forceinline__ T shared_scale(const Parameters& p, int64_t i) {
    const uint32_t block = static_cast<uint32_t>(p.second);
    const int64_t b = i >> 32 == 0 ? static_cast<int64_t>(static_cast<uint32_t>(i) / block) : i / p.second;
    return load_value<T>(p.wires[0] + b * static_cast<int64_t>(sizeof(T)));
}

template <class T, class Number>
__device__ __forceinline__ void encode_integers(const Parameters& p) {
    for_values<8>(p.n, [&](const Values& at) {
        T x[8];
        load_fed(p, at, x);
        const IntegerSteps<T> steps(shared_scale<T>(p, at.i), p.first);
        Number numbers[8];
        COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) {
            const T level = steps.level(x[k]);
            numbers[k] = static_cast<Number>(static_cast<int32_t>(level));
            x[k] = steps.lost(x[k], level);
        }
        store_elements(p.out + at.i * static_cast<int64_t>(sizeof(Number)), at.count, numbers);
        if (p.residual != nullptr) at.store(p.residual, computed_storage<T>, x);
    });
}

template <class T, class Number, class Signed>
__device__ __forceinline__ void decode_integers(const Parameters& p) {
    for_values<8>(p.n, [&](const Values& at) {
        Number numbers[8];
        load_elements(p.wires[1] + at.i * static_cast<int64_t>(sizeof(Number)), at.count, numbers);
        const IntegerSteps<T> steps(shared_scale<T>(p, at.i), p.first);
        T x[8];
        COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) x[k] = steps.value(static_cast<Signed>(numbers[k]));
        at.store(p.out, p.out_storage, x);
    });
}

// Eight fields of at most 8 bits fill whole bytes.
template <class T>
__device__ __forceinline__ void encode_votes(const Parameters& p) {
    const int width = p.variant;
    for_values<8>(p.n, [&](const Values& at) {
        T x[8];
        at.load(p.add, p.add_storage, x);
        uint32_t votes[8];
        COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) votes[k] = k < at.count ? vote(x[k]) : 0;
        if (width > 16) return store_elements(p.out + 4 * at.i, at.count, votes);
        if (width > 8) {
            uint16_t numbers[8];
            COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) numbers[k] = static_cast<uint16_t>(votes[k]);
            return store_elements(p.out + 2 * at.i, at.count, numbers);
        }
        uint64_t fields = 0;
        COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) fields |= uint64_t(votes[k]) << width * k;
        store_bytes(p.out + at.i / 8 * width, fields, (width * at.count + 7) / 8);
    });
}

template <class T>
__device__ __forceinline__ void decode_votes(const Parameters& p) {
    const int width = p.variant;
    const uint32_t ranks = static_cast<uint32_t>(p.first);
    for_values<8>(p.n, [&](const Values& at) {
        uint32_t votes[8];
        if (width > 16) {
            load_elements(p.wires[1] + 4 * at.i, at.count, votes);
        } else if (width > 8) {
            uint16_t numbers[8];
            load_elements(p.wires[1] + 2 * at.i, at.count, numbers);
            COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) votes[k] = numbers[k];
        } else {
            const uint64_t fields = load_bytes(p.wires[1] + at.i / 8 * width, (width * at.count + 7) / 8);
            COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) votes[k] = static_cast<uint32_t>(fields >> width * k) & ((1u << width) - 1);
        }
        const bool finite = is_finite(shared_scale<T>(p, at.i));
        T x[8];
        COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) x[k] = finite ? verdict<T>(votes[k], ranks) : quiet_nan<T>();
        at.store(p.out, p.out_storage, x);
    });
}

template <class Number, class Combine>
__device__ __forceinline__ void combine_as(const Parameters& p, Combine combine) {
    constexpr int many = 16 / sizeof(Number);
    for_values<many>(p.n, [&](const Values& values) {
        const int64_t at = values.i * static_cast<int64_t>(sizeof(Number));
        const int count = values.count;
        Number all[many];
        if (p.add != nullptr) load_elements(p.add + at, count, all);
        COMPCOLL_ROLLED for (int w = 0; w < p.wire_count; ++w) {
            Number one[many];
            load_elements(p.wires[w] + at, count, one);
            const bool first = w == 0 && p.add == nullptr;
            COMPCOLL_UNROLL for (int k = 0; k < many; ++k) all[k] = first ? one[k] : static_cast<Number>(combine(all[k], one[k]));
        }
        store_elements(p.out + at, count, all);
        if (p.decoded != nullptr) store_elements(p.decoded + at, count, all);
    });
}

__device__ __forceinline__ void combine_numbers(const Parameters& p) {
    if (p.first == 0) {
        if (p.variant == 1) return combine_as<uint8_t>(p, Sum());
        if (p.variant == 2) return combine_as<uint16_t>(p, Sum());
        return combine_as<uint32_t>(p, Sum());
    }
    if (p.variant == 4) return combine_as<uint32_t>(p, Larger());
    combine_as<uint64_t>(p, Larger());
}

}  // namespace compcoll
