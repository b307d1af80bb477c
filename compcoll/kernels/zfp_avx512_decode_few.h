// ZFP on AVX-512, decoding strings of at most 16 bits: one look-up of the seven bits after the header decodes all planes at once.
#pragma once

#include "zfp_avx512_decode.h"

namespace compcoll {
namespace {

constexpr int few_bits = 16;

// The top byte of each coefficient.
struct alignas(64) TopPlanes {
    uint8_t of[4][128];
};

constexpr TopPlanes top_planes(int maxbits) {
    TopPlanes top{};
    const int bits = maxbits - zfp::header_bits<float>;
    for (int i = 0; i < 128; ++i) {
        const uint32_t code = uint32_t(i) & ((1u << bits) - 1);
        for (int k = 7, at = 0, significant = 0; at < bits; --k) {
            const zfp::Plane plane = zfp::decode_plane(code >> at, significant, bits - at);
            for (int c = 0; c < 4; ++c) top.of[c][i] = uint8_t(top.of[c][i] | (plane.bits >> c & 1) << k);
            at += plane.length, significant = plane.significant;
        }
    }
    return top;
}

constexpr TopPlanes tops[] = {top_planes(9),  top_planes(10), top_planes(11), top_planes(12),
                              top_planes(13), top_planes(14), top_planes(15), top_planes(16)};

template <int groups>
STEP void decode_few(const V (&s)[groups], int maxbits, Decoded<float> (&group)[groups]) {
    using T = float;
    const TopPlanes& top = tops[maxbits - zfp::header_bits<T>];
    UNROLL for (int g = 0; g < groups; ++g) {
        group[g].head = read_head<T>(s[g], V());
        // seven bits count, and none if nothing is coded
        const V code = left_only<T>(group[g].head.coded, s[g], all<T>(few_bits - 1));
        UNROLL for (int i = 0; i < 4; ++i)
            group[g].d[i] = _mm512_maskz_permutex2var_epi8(0x8888888888888888, load(top.of[i]), code, load(top.of[i] + 64));
        recorrelate<T>(group[g].d);
    }
}

}  // namespace
}  // namespace compcoll
