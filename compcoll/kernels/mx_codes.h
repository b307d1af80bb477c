// Runs of at most 32 values and their packed codes on the CPU, for the loops of mx and nvfp4.
#pragma once

#include <type_traits>
#include <utility>

#include "blocks.h"
#include "nvfp4.h"

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns about its own intrinsics (GCC bug 105593)

namespace compcoll {
namespace {

// Load n values, and zeros after them.
template <class T>
COMPCOLL_HD void load_run(const T* values, size_t n, T (&x)[mx_block]) {
    if (n < mx_block) std::memset(x, 0, sizeof(x));
    // Not by memcpy, whose stores may be shorter than the vectors that are loaded next, which makes these wait.
    for (size_t i = 0; i < n; ++i) x[i] = load<T>(values + i);
}

// ---- rotation ----

template <class T>
using RunOfVectors = typename VectorOf<T>::Values[mx_block / lanes<T>];

template <class T, int distance, size_t... lane>
COMPCOLL_HD void add_and_subtract(RunOfVectors<T>& x, std::index_sequence<lane...> all) {
    constexpr int count = mx_block / lanes<T>, apart = distance / static_cast<int>(lanes<T>);
    RunOfVectors<T> sums;
    for (int i = 0; i < count; ++i) {
        if constexpr (apart > 0) {
            sums[i] = i & apart ? x[i ^ apart] - x[i] : x[i] + x[i ^ apart];
        } else {
            constexpr typename VectorOf<T>::Bits subtracted = {(lane & distance ? ~all_but_sign<T> : BitsOf<T>(0))...};
            const auto partner = __builtin_shufflevector(x[i], x[i], static_cast<int>(lane ^ distance)...);
            sums[i] = partner + bits_as<typename VectorOf<T>::Values>(bits_as<typename VectorOf<T>::Bits>(x[i]) ^ subtracted);
        }
    }
    for (int i = 0; i < count; ++i) x[i] = sums[i];
    if constexpr (distance > 1) add_and_subtract<T, distance / 2>(x, all);
}

// H·x/√32, which is its own inverse.
template <class T>
COMPCOLL_HD void transform(T (&x)[mx_block]) {
    RunOfVectors<T> vectors;
    std::memcpy(vectors, x, sizeof(x));
    for (auto& vector : vectors) vector *= one_over_root_32<T>;
    add_and_subtract<T, mx_block / 2>(vectors, std::make_index_sequence<lanes<T>>());
    std::memcpy(x, vectors, sizeof(x));
}

template <class T>
COMPCOLL_HD void rotate(T (&x)[mx_block]) {
    flip_signs(x);
    transform(x);
}

template <class T>
COMPCOLL_HD void rotate_back(T (&x)[mx_block]) {
    transform(x);
    flip_signs(x);
}

// ---- codes ----

using Code = uint32_t;  // as wide as the values, so that vectors are narrowed once

template <int bits>
COMPCOLL_HD void pack(const Code (&codes)[mx_block], uint8_t* to) {
#if defined(__AVX512F__)
    for (int half = 0; half < 2; ++half, to += 2 * bits) {
        const __m512i words = _mm512_load_si512(codes + 16 * half);
        if constexpr (bits == 8) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(words));
        } else {
            const __m512i pairs = _mm512_or_si512(words, _mm512_srli_epi64(words, 32 - bits));
            if constexpr (bits == 4) {
                _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm512_cvtepi64_epi8(pairs));
            } else {
                const __m128i twos = _mm512_cvtepi64_epi16(pairs);
                const __m128i high = _mm_and_si128(_mm_srli_epi32(twos, 4), _mm_set1_epi32(0xfff000));
                const __m128i fours = _mm_or_si128(_mm_and_si128(twos, _mm_set1_epi32(0xfff)), high);
                const __m128i places = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
                const __m128i bytes = _mm_shuffle_epi8(fours, places);
                std::memcpy(to, &bytes, 2 * bits);
            }
        }
    }
#else
    alignas(32) uint8_t narrow[mx_block];
    if constexpr (bits == 4) {
        for (int i = 0; i < mx_block / 2; ++i) {
            const auto two = load<uint64_t>(codes + 2 * i);
            to[i] = static_cast<uint8_t>(two | two >> 28);
        }
    } else {
        uint8_t* const bytes = bits == 8 ? to : narrow;
        for (int i = 0; i < mx_block; ++i) bytes[i] = static_cast<uint8_t>(codes[i]);
        if constexpr (bits != 8)
            for (int i = 0; i < mx_block; i += 8) store_bytes<bits>(to + i / 8 * bits, packed(load<uint64_t>(narrow + i), bits));
    }
#endif
}

template <int bits>
COMPCOLL_HD void store_codes(const Code (&codes)[mx_block], size_t n, uint8_t* wire) {
    if (n == mx_block) return pack<bits>(codes, wire);
    alignas(64) uint8_t bytes[mx_block * bits / 8];
    pack<bits>(codes, bytes);  // codes beyond n are 0
    std::memcpy(wire, bytes, (n * bits + 7) / 8);
}

template <int bits>
COMPCOLL_HD void load_codes(const uint8_t* wire, size_t n, uint8_t (&codes)[mx_block]) {
    alignas(64) uint8_t bytes[mx_block * bits / 8];
    const size_t nbytes = (n * bits + 7) / 8;
    if (n < mx_block) std::memset(bytes, 0, sizeof(bytes));
    for (size_t i = 0; i < nbytes; ++i) bytes[i] = wire[i];
    if constexpr (bits == 8) {
        for (int i = 0; i < mx_block; ++i) codes[i] = bytes[i];
    } else if constexpr (bits == 4) {
        for (int i = 0; i < mx_block / 2; ++i) store(codes + 2 * i, static_cast<uint16_t>((bytes[i] | bytes[i] << 4) & 0x0f0f));
    } else {
        for (int i = 0; i < mx_block / 8; ++i) store(codes + 8 * i, unpacked(load_bytes<bits>(bytes + i * bits), bits));
    }
}

// Call run(rotated, i, length) for each 32 of n values: `rotated` and `length` are constants of the compiler, except for the last
// values if there are fewer; those are not rotated.
template <class Run>
COMPCOLL_HD void for_runs(bool rotated, size_t n, Run run) {
    size_t i = 0;
    const auto full = [&](auto rotated) {
        for (; i + mx_block <= n; i += mx_block) run(rotated, i, std::integral_constant<size_t, mx_block>());
    };
    if (rotated) full(std::true_type());
    else full(std::false_type());
    if (i < n) run(std::false_type(), i, n - i);
}

}  // namespace
}  // namespace compcoll
