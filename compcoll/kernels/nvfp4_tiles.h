// The nvfp4 codec's loops, written for the compiler's vectorizer. Each instruction set compiles them. Everything here is in an
// unnamed namespace, so that the linker never mixes functions of two sets.
#pragma once

#include "mx_codes.h"

namespace compcoll {
namespace {

constexpr int groups_of_run = mx_block / nvfp4_group;

template <class T>
void encode_block(bool rotates, const T* values, size_t n, uint8_t* wire) {
    using Codec = NVFP4<T>;
    alignas(64) T x[nvfp4_block / mx_block][mx_block];
    T largest[nvfp4_groups] = {};
    for_runs(rotates, n, [&](auto rotated, size_t i, auto length) {
        T(&run)[mx_block] = x[i / mx_block];
        load_run(values + i, length, run);
        if (rotated) rotate(run);
        for (int group = 0; group < groups_of_run; ++group)
            largest[i / nvfp4_group + group] = largest_magnitude(run + group * nvfp4_group, nvfp4_group);
    });
    const float scale = Codec::block_scale(largest_magnitude(largest, nvfp4_groups), rotates && n >= mx_block);
    store(wire, scale);
    wire += sizeof(scale);
    if (!Codec::has_codes(scale)) return void(std::memset(wire, 0, nvfp4_groups + (n + 1) / 2));
    for (int group = 0; group < nvfp4_groups; ++group) wire[group] = Codec::group_scale(largest[group], scale);
    for_runs(false, n, [&](auto, size_t i, auto length) {
        alignas(64) Code codes[mx_block];
        for (int group = 0; group < groups_of_run; ++group) {
            const T divisor = Codec::divisor(Codec::unit(wire[i / nvfp4_group + group], scale));
            for (int k = group * nvfp4_group; k < (group + 1) * nvfp4_group; ++k)
                codes[k] = static_cast<Code>(Codec::code(x[i / mx_block][k], divisor));
        }
        store_codes<4>(codes, length, wire + nvfp4_groups + i / 2);
    });
}

template <bool add, class T>
void decode_block(bool rotates, const uint8_t* wire, size_t n, const T* base, T* values) {
    using Codec = NVFP4<T>;
    const auto scale = load<float>(wire);
    wire += sizeof(scale);
    if (!Codec::has_codes(scale)) return fill<add>(Codec::only_value(scale), n, base, values);
    for_runs(rotates, n, [=](auto rotated, size_t i, auto length) {
        alignas(64) uint8_t codes[mx_block];
        alignas(64) T x[mx_block];
        load_codes<4>(wire + nvfp4_groups + i / 2, length, codes);
        for (int group = 0; group < groups_of_run; ++group) {
            const T unit = Codec::unit(wire[i / nvfp4_group + group], scale);
            for (int k = group * nvfp4_group; k < (group + 1) * nvfp4_group; ++k) x[k] = Codec::value(codes[k], unit);
        }
        if (rotated) rotate_back(x);
        SAME_OR_APART for (size_t k = 0; k < length; ++k) put<add>(values + i + k, base + i + k, x[k]);
    });
}

// Call use(begin, length, record) for each block.
template <class Use>
void for_blocks(size_t n, Use use) {
    constexpr size_t nbytes = nvfp4_header_nbytes + nvfp4_block / 2;
    for (size_t begin = 0; begin < n; begin += nvfp4_block) use(begin, smaller(nvfp4_block, n - begin), begin / nvfp4_block * nbytes);
}

template <class T>
void encode(const T* values, size_t n, uint8_t* wire, Config config) {
    for_blocks(n, [=](size_t i, size_t length, size_t at) { encode_block(config.first == 1, values + i, length, wire + at); });
}

template <bool add, class T>
void decode(const uint8_t* wire, size_t n, const T* base, T* values, Config config) {
    for_blocks(n, [=](size_t i, size_t length, size_t at) {
        decode_block<add>(config.first == 1, wire + at, length, base + i, values + i);
    });
}

template <class T>
constexpr TileFunctions<T> functions = {encode<T>, decode<false, T>, decode<true, T>};

constexpr Kernels these_nvfp4 = {functions<float>, functions<double>};

}  // namespace
}  // namespace compcoll
