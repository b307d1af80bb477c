// ZFP on AVX-512: the tables of the plane code, computed from the textbook versions in zfp.h, and small vector helpers.
//
// A bit plane's code depends on four bits and on n, the number of coefficients already significant. n = 3 and n = 4 share
// one code, so encoding uses a table of 64 bytes (one vpermb). Decoding uses the next bits of the stream: after the
// first plane n is at least 1, and 6, 5 and 4 bits decide for n = 1, 2, 3: a table of 128 bytes (one vpermi2b).
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // g++ 12 warns about its own intrinsics (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "tile.h"
#include "zfp.h"

// Steps are always inlined, so that groups stay in registers and are interleaved.
#define STEP inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace compcoll {
namespace {

using V = __m512i;

template <int N>
struct alignas(64) Bytes {
    uint8_t at[N];
};

STEP V load(const void* p) { return _mm512_loadu_si512(p); }
STEP void store(void* p, V v) { _mm512_storeu_si512(p, v); }

template <class Entry>
constexpr Bytes<64> bytes(Entry entry) {
    Bytes<64> table{};
    for (int i = 0; i < 64; ++i) table.at[i] = uint8_t(entry(i));
    return table;
}

// Eight bytes, repeated in every quadword.
template <class Entry>
constexpr Bytes<64> quadwords(Entry entry) {
    return bytes([&](int i) { return entry(i % 8); });
}

// --- encoding: index = plane | n << 4 -----------------------------------------------------------------------------------------

constexpr auto code_bits = bytes([](int i) { return zfp::encode_plane(i & 15, i >> 4).bits; });
constexpr auto code_length = bytes([](int i) { return zfp::encode_plane(i & 15, i >> 4).length; });
constexpr auto code_power = bytes([](int i) { return 1 << zfp::encode_plane(i & 15, i >> 4).length; });

// --- decoding: index = 64 | 6 bits if n = 1, 32 | 5 bits if n = 2, 0 | 4 bits and an ignored one if n ≥ 3 --------------------

constexpr int region_of(int significant) { return significant == 1 ? 64 : significant == 2 ? 32 : 0; }
constexpr int region_mask = 96;

constexpr zfp::Plane plane_at(int index) {
    const int significant = index >= 64 ? 1 : index >= 32 ? 2 : 3;
    return zfp::decode_plane(uint32_t(index) & (significant == 1 ? 63u : 31u), significant, 8);
}

// The first nonempty plane, whose leading 1 is removed.
constexpr zfp::Plane first_plane_at(int index) {
    zfp::Plane plane = zfp::decode_plane(uint32_t(index) << 1 | 1, 0, 8);
    --plane.length;
    return plane;
}

constexpr int step_of(const zfp::Plane& plane) { return plane.length | region_of(plane.significant); }

constexpr auto first_bits = bytes([](int i) { return first_plane_at(i).bits; });
constexpr auto first_step = bytes([](int i) { return step_of(first_plane_at(i)); });
constexpr auto low_bits = bytes([](int i) { return plane_at(i).bits; });
constexpr auto high_bits = bytes([](int i) { return plane_at(i + 64).bits; });
constexpr auto low_step = bytes([](int i) { return step_of(plane_at(i)); });
constexpr auto high_step = bytes([](int i) { return step_of(plane_at(i + 64)); });

// --- 8×8 bit transposes: y = gf2p8affineqb(x, A) has bit i of y[j] = Σ A[7 - i] & x[j] ---------------------------------------

// Row order of an octet's matrix, and thus bit order of its planes' indices: n1 n0 d3 d2 d1 d0, with d0 in the lowest bit.
constexpr auto planes_down = quadwords([](int j) { return 128 >> j; });             // y[j] = plane 7 - j
constexpr auto nibbles_low = quadwords([](int j) { return j < 4 ? 128 >> 2 * j : 0; });  // two planes per byte, low half
constexpr auto nibbles_high = quadwords([](int j) { return j < 4 ? 0 : 128 >> 2 * (j - 4); });
constexpr auto bits_up_low = quadwords([](int j) { return j < 4 ? 1 << j : 0; });   // y[j] = bit j of each row
constexpr auto bits_up_high = quadwords([](int j) { return j < 4 ? 0 : 1 << (j - 4); });
constexpr auto eight_nibbles_low = quadwords([](int j) { return 4 * j; });  // vpmultishiftqb: nibble j starts at bit 4j
constexpr auto eight_nibbles_high = quadwords([](int j) { return 32 + 4 * j; });

// --- block order --------------------------------------------------------------------------------------------------------------
// The 4×4 transpose puts block 4k + j of sixteen into lane 4j + k. Unpacked to quadwords, eight blocks have the order 0 4 1 5 2 6 3 7.

STEP V transposed_lanes() { return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); }

template <class T>
STEP V block_of_lane() {
    return sizeof(T) == 4 ? _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7) : _mm512_setr_epi64(0, 2, 1, 3, 4, 6, 5, 7);
}

template <class T>
STEP V lane_of_block() {
    return sizeof(T) == 4 ? _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7) : _mm512_setr_epi64(0, 2, 1, 3, 4, 6, 5, 7);
}

STEP V ones_epi8() { return _mm512_set1_epi8(1); }
STEP V low_half() { return _mm512_set1_epi64(0xffffffff); }

// The low (0) or high (1) double words of two registers' quadwords; it undoes a pair of unpacks.
template <int which>
STEP V narrow(V a, V b) {
    constexpr int lanes = which == 0 ? 0x88 : 0xdd;
    return _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), lanes));
}

template <int function>
STEP V ternary(V a, V b, V c) { return _mm512_ternarylogic_epi64(a, b, c, function); }

// Truth tables of ternary(a, b, c): bit 4a + 2b + c.
constexpr int a_or_b_and_c = 0xf8, a_and_b_or_c = 0xe0, a_xor_b_xor_c = 0x96, b_if_c_else_a = 0xd8, a_or_b_or_c = 0xfe,
              either_and_c = 0xa8;

}  // namespace
}  // namespace compcoll
