// Sparsification on a GPU: passes over a whole buffer, and passes over the few elements taken from it or added to it. They use
// these `Parameters`:
//
//   moments   add: values → out: for each `moment_values` values and lane: sum, sum of magnitudes, sum of squares, largest magnitude
//   sample    add: `position` values → out: runs of `sample_run` values, n in all
//   count     add: values, seed: bits of the threshold; residual: second moments or null, residual_scale: alpha
//             → out: for each tile the number of elements that meet the condition; decoded: for each thread one bit per value,
//             for four values of each of its warp's rounds (device_rounds.h)
//   place     n tiles; out: those counts → number of elements before each tile; decoded: the total
//   compact   wires[0]: number of elements before each tile, wires[1]: those bits → out: ascending indices, at most `position`;
//             reads no values
//   take      add: values, wires[0]: n indices → out
//   put       add: n values or null for zeros, wires[0]: n indices or null for all → out
//   add       add: n values, wires[0]: n indices → out, incremented by them
//   subtract  the same → out, the remainder
//
// A thread block of 256 threads processes a tile, with eight values per thread and two rounds per warp.
// In add and subtract, an index must occur only once.
#pragma once

#include "device_rounds.h"
#include "sparse.h"

namespace compcoll {

constexpr int tile_threads = 256, tile_values = 8 * tile_threads, moment_loads = 16;

// Return the sum of `count` over earlier threads of the thread block, and in `all` over all its threads. Call it once per kernel.
template <class Number>
__device__ __forceinline__ Number before_thread(Number count, Number& all) {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
    Number below = 0;
    for (int distance = 1; distance < 32; distance *= 2) {  // `count` is the sum over `distance` adjacent threads
        const Number other = __shfl_xor_sync(0xffffffffu, count, distance);
        if (thread & distance) below += other;
        count += other;
    }
    __shared__ Number of_warps[tile_threads / 32];
    if (thread % 32 == 0) of_warps[warp] = count;
    __syncthreads();
    all = 0;
    for (int other = 0; other < tile_threads / 32; ++other) {
        if (other < warp) below += of_warps[other];
        all += of_warps[other];
    }
    return below;
}

// One bit for each of this thread's eight values that meets the condition: four adjacent values in each of its warp's two rounds.
template <class T>
__device__ __forceinline__ uint32_t met(const Parameters& p, uint32_t& how_many) {
    const auto threshold = static_cast<SignedOf<T>>(p.seed);
    const int64_t begin = int64_t(blockIdx.x) * tile_values + static_cast<int>(threadIdx.x) / warp_threads * 2 * round_values;
    uint32_t bits = 0;
    how_many = 0;
    COMPCOLL_UNROLL for (int r = 0; r < 2; ++r) {
        const int64_t first = begin + r * round_values + 4 * lane_of_warp();
        const int count = p.n - first >= 4 ? 4 : p.n > first ? static_cast<int>(p.n - first) : 0;
        T x[4], v[4] = {};
        const auto load = [&](const uint8_t* array, T(&to)[4]) {
            if (begin + 2 * round_values <= p.n) RoundsOf<T>(array, computed_storage<T>, begin).load(r, to);
            else load_values(array, computed_storage<T>, first, count, to);
        };
        load(p.add, x);
        if (p.residual != nullptr) load(p.residual, v);
        COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) {
            const bool meets = p.residual == nullptr ? is_above(x[k], threshold)
                                                     : is_unambiguous(x[k], v[k], threshold, static_cast<T>(p.residual_scale));
            if (k < count && meets) bits |= 1u << (4 * r + k), ++how_many;
        }
    }
    return bits;
}

template <class T>
__device__ __forceinline__ void count_elements(const Parameters& p) {
    uint32_t own, all;
    const uint32_t bits = met<T>(p, own);
    reinterpret_cast<uint8_t*>(p.decoded)[int64_t(blockIdx.x) * tile_threads + threadIdx.x] = static_cast<uint8_t>(bits);
    before_thread(own, all);
    if (threadIdx.x == 0) reinterpret_cast<uint32_t*>(p.out)[blockIdx.x] = all;
}

// Run by one thread block, whose threads each take an equal number of adjacent tiles.
__device__ __forceinline__ void place_tiles(const Parameters& p) {
    uint32_t* counts = reinterpret_cast<uint32_t*>(p.out);
    const int64_t share = (p.n + tile_threads - 1) / tile_threads, begin = share * static_cast<int>(threadIdx.x);
    const int64_t end = begin + share < p.n ? begin + share : p.n;
    uint32_t own = 0, all;
    for (int64_t tile = begin; tile < end; ++tile) own += counts[tile];
    uint32_t before = before_thread(own, all);
    for (int64_t tile = begin; tile < end; ++tile) {
        const uint32_t count = counts[tile];
        counts[tile] = before;
        before += count;
    }
    if (threadIdx.x == 0) *reinterpret_cast<uint32_t*>(p.decoded) = all;
}

__device__ __forceinline__ void compact_elements(const Parameters& p) {
    const int lane = lane_of_warp();
    const int64_t warp = int64_t(blockIdx.x) * tile_threads + (static_cast<int>(threadIdx.x) - lane), first = 8 * (warp + lane);
    // Its eight adjacent values are four and four of one round, counted by two lanes.
    const uint32_t pair = reinterpret_cast<const uint16_t*>(p.wires[1] + warp)[lane % 16], of_round = pair >> lane / 16 * 4;
    const uint32_t bits = (of_round & 15) | (of_round >> 4 & 0xf0);
    uint32_t own = 0, all;
    COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) own += bits >> k & 1;
    uint64_t at = reinterpret_cast<const uint32_t*>(p.wires[0])[blockIdx.x] + uint64_t(before_thread(own, all));
    uint32_t* indices = reinterpret_cast<uint32_t*>(p.out);
    COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) {
        if ((bits >> k & 1) == 0) continue;
        if (at < p.position) indices[at] = static_cast<uint32_t>(first + k);
        ++at;
    }
}

template <class T>
__device__ __forceinline__ void add_up_lanes(const Parameters& p) {
    const T* values = reinterpret_cast<const T*>(p.add);
    T* sums = reinterpret_cast<T*>(p.out);
    for (int64_t i = first_thread(); i < p.blocks * moment_lanes<T>; i += all_threads()) {
        const int64_t block = i / moment_lanes<T>, begin = block * moment_values<T>;
        const int64_t end = begin + moment_values<T> < p.n ? begin + moment_values<T> : p.n;
        T sum = 0, absolute = 0, square = 0;
        SignedOf<T> largest = 0;
        const auto add = [&](T value) {
            const auto magnitude = magnitude_bits(value);
            if (magnitude >= infinity_bits<T>) return;
            sum = exact_sum(sum, value);
            absolute = exact_sum(absolute, bits_as<T>(magnitude));
            square = exact_sum(square, exact_product(value, value));
            largest = magnitude > largest ? magnitude : largest;
        };
        // There are few threads: each has many loads in flight, and then adds the values in order.
        int64_t at = begin + i % moment_lanes<T>;
        for (; at + (moment_loads - 1) * moment_lanes<T> < end; at += moment_loads * moment_lanes<T>) {
            T loaded[moment_loads];
            COMPCOLL_UNROLL for (int k = 0; k < moment_loads; ++k) loaded[k] = values[at + k * moment_lanes<T>];
            COMPCOLL_UNROLL for (int k = 0; k < moment_loads; ++k) add(loaded[k]);
        }
        for (; at < end; at += moment_lanes<T>) add(values[at]);
        sums[4 * i] = sum, sums[4 * i + 1] = absolute, sums[4 * i + 2] = square, sums[4 * i + 3] = bits_as<T>(largest);
    }
}

// Call work(i) for each of n elements.
template <class Work>
__device__ __forceinline__ void for_each_element(const Parameters& p, const Work& work) {
    for (int64_t i = first_thread(); i < p.n; i += all_threads()) work(i);
}

template <class T>
__device__ __forceinline__ void sample_elements(const Parameters& p) {
    const T* values = reinterpret_cast<const T*>(p.add);
    T* sampled = reinterpret_cast<T*>(p.out);
    const uint64_t runs = static_cast<uint64_t>(p.n) / sample_run;
    for_each_element(p, [&](int64_t i) {
        const uint64_t run = static_cast<uint64_t>(i) / sample_run;
        sampled[i] = values[sample_begin(p.position, runs, run) + static_cast<uint64_t>(i) % sample_run];
    });
}

template <class T>
__device__ __forceinline__ void take_elements(const Parameters& p) {
    const T* values = reinterpret_cast<const T*>(p.add);
    const uint32_t* indices = reinterpret_cast<const uint32_t*>(p.wires[0]);
    T* taken = reinterpret_cast<T*>(p.out);
    for_each_element(p, [&](int64_t i) { taken[i] = values[indices[i]]; });
}

template <class T>
__device__ __forceinline__ void put_elements(const Parameters& p) {
    const T* values = reinterpret_cast<const T*>(p.add);
    const uint32_t* indices = reinterpret_cast<const uint32_t*>(p.wires[0]);
    T* out = reinterpret_cast<T*>(p.out);
    for_each_element(p, [&](int64_t i) { out[indices == nullptr ? i : indices[i]] = values == nullptr ? T(0) : values[i]; });
}

// Apply combine(element, value) to the elements at the indices.
template <class T, class Combine>
__device__ __forceinline__ void combine_elements(const Parameters& p, const Combine& combine) {
    const T* values = reinterpret_cast<const T*>(p.add);
    const uint32_t* indices = reinterpret_cast<const uint32_t*>(p.wires[0]);
    T* out = reinterpret_cast<T*>(p.out);
    for_each_element(p, [&](int64_t i) { out[indices[i]] = combine(out[indices[i]], values[i]); });
}

template <class T>
__device__ __forceinline__ void add_elements(const Parameters& p) {
    combine_elements<T>(p, [](T element, T value) { return exact_sum(element, value); });
}

template <class T>
__device__ __forceinline__ void subtract_elements(const Parameters& p) {
    combine_elements<T>(p, [](T element, T sent) { return rest_of(element, sent); });
}

}  // namespace compcoll
