// The codecs mx and nvfp4 on a GPU: a thread encodes and decodes 32 values at a time, in its registers. Programs for one
// configuration of mx use device_warps.h, where eight lanes have a block.
#pragma once

#include "device_blocks.h"
#include "device_small_floats.h"
#include "nvfp4.h"

namespace compcoll {

template <class T>
__device__ __forceinline__ T largest_of(const T (&x)[mx_block], int begin, int end) {
    SignedOf<T> largest = 0;
    COMPCOLL_UNROLL for (int k = begin; k < end; ++k) largest = Larger()(largest, magnitude_bits(x[k]));
    return bits_as<T>(largest);
}

template <int distance, class T>
__device__ __forceinline__ void add_and_subtract(T (&x)[rotated_values]) {
    COMPCOLL_UNROLL for (int i = 0; i < rotated_values; ++i) {
        if (i & distance) continue;
        const T a = x[i], b = x[i + distance];
        x[i] = exact_sum(a, b), x[i + distance] = exact_sum(a, -b);
    }
    if constexpr (distance > 1) add_and_subtract<distance / 2>(x);
}

// H·x/√32, which is its own inverse.
template <class T>
__device__ __forceinline__ void transform(T (&x)[rotated_values]) {
    COMPCOLL_UNROLL for (int i = 0; i < rotated_values; ++i) x[i] = exact_product(x[i], one_over_root_32<T>);
    add_and_subtract<rotated_values / 2>(x);
}

template <class T>
__device__ __forceinline__ void rotate(T (&x)[rotated_values]) {
    flip_signs(x);
    transform(x);
}

template <class T>
__device__ __forceinline__ void rotate_back(T (&x)[rotated_values]) {
    transform(x);
    flip_signs(x);
}

// Call work(eight, count) for each eight of a thread's values, of which `count` are there. 32 doubles of several arrays do not fit the
// registers: the compiler keeps them in memory if the loop is not unrolled.
template <class T, class Work>
__device__ __forceinline__ void for_eights(const Values& at, const Work& work) {
    const auto one = [&](int eight) {
        const int count = at.count - 8 * eight;
        if (count > 0) work(eight, count < 8 ? count : 8);
    };
    if constexpr (sizeof(T) == 8) {
        COMPCOLL_ROLLED for (int eight = 0; eight < mx_block / 8; ++eight) one(eight);
    } else {
        COMPCOLL_UNROLL for (int eight = 0; eight < mx_block / 8; ++eight) one(eight);
    }
}

template <class T>
struct MXCode : BlockCodec<MXCode<T>, MX<T>> {
    using Base = BlockCodec<MXCode<T>, MX<T>>;
    using Header = uint8_t;
    static constexpr int many = mx_block, staged_header = 1;
    using Base::Base;

    __device__ __forceinline__ Header header(const SignedOf<T> (&maxima)[1], const int64_t (&)[1], int) const {
        return this->codec.header(bits_as<T>(maxima[0]), this->codec.rotates(mx_block));
    }
    // The four codes of a lane's values, without a branch.
    __device__ __forceinline__ uint32_t word_of(Header scale, const T (&x)[4]) const {
        uint32_t word = 0;
        this->codec.with_encoder(scale, [&](auto encoder) { word = four_codes(encoder, x); });
        return this->codec.has_codes(scale) ? word : 0;
    }
    // Four values of each of eight lanes, which add and subtract in the order of hadamard.h.
    __device__ __forceinline__ void transform_in_warp(T (&x)[4]) const {
        COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) x[k] = exact_product(x[k], one_over_root_32<T>);
        COMPCOLL_UNROLL for (int distance = 4; distance > 0; distance /= 2) {
            const bool subtracts = static_cast<int>(threadIdx.x) & distance;
            COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) {
                const T theirs = __shfl_xor_sync(0xffffffffu, x[k], distance);
                x[k] = exact_sum(theirs, subtracts ? -x[k] : x[k]);
            }
        }
        COMPCOLL_UNROLL for (int distance = 2; distance > 0; distance /= 2) {
            T sums[4];
            COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) sums[k] = exact_sum(x[k ^ distance], k & distance ? -x[k] : x[k]);
            COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) x[k] = sums[k];
        }
    }
    __device__ __forceinline__ void flip_signs_in_warp(T (&x)[4]) const {
        const uint32_t flipped = flipped_signs >> 4 * (threadIdx.x % 8);
        COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) x[k] = flipped >> k & 1 ? -x[k] : x[k];
    }
    __device__ __forceinline__ void rotate_in_warp(T (&x)[4]) const {
        if (!this->codec.rotates(mx_block)) return;
        flip_signs_in_warp(x);
        transform_in_warp(x);
    }
    __device__ __forceinline__ void rotate_back_in_warp(Header scale, T (&x)[4]) const {
        if (!this->codec.rotates(mx_block)) return;
        transform_in_warp(x);
        flip_signs_in_warp(x);
        if (this->codec.has_codes(scale)) return;
        COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) x[k] = this->codec.only_value(scale);
    }
    __device__ __forceinline__ void encode(uint8_t* wire, const Values& at, T (&x)[many]) const {
        const bool rotated = this->codec.rotates(static_cast<size_t>(at.count));
        if (rotated) rotate(x);
        uint8_t* to = wire + this->layout.record(at.i / mx_block);
        const Header scale = *to = this->codec.header(largest_of(x, 0, many), rotated);
        this->with_encoder(scale, [&](auto encoder) {
            for_eights<T>(at, [&](int eight, int count) {
                uint64_t codes = 0;
                COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) codes |= uint64_t(encoder.code(x[8 * eight + k])) << 8 * k;
                this->layout.store_codes(to, eight, count, codes);
            });
        });
    }
    __device__ __forceinline__ void decode(const uint8_t* wire, const Values& at, T (&x)[many]) const {
        const uint8_t* from = wire + this->layout.record(at.i / mx_block);
        this->with_decoder(*from, [&](auto decoder) {
            for_eights<T>(at, [&](int eight, int count) {
                const uint64_t codes = this->layout.load_codes(from, eight, count);
                COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) x[8 * eight + k] = decoder.value(code_in(codes, k));
            });
        });
        if (this->codec.has_codes(*from) && this->codec.rotates(static_cast<size_t>(at.count))) rotate_back(x);
    }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Elements of 4 and 6 bits are rounded to 8 bits by the GPU: a format with more exponent bits and as many fraction bits has the same
// magnitudes, times a power of two, and one with more fraction bits has them in its upper bits.
constexpr uint32_t in_each_byte(uint32_t bits) { return bits * 0x01010101u; }

template <class Element>
__device__ __forceinline__ uint32_t four_codes(const MX<float>::Encoder<Element>& encoder, const float (&x)[4]) {
    if constexpr (Element::emax == MXInt8::emax) {
        uint32_t word = 0;
        COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) word |= encoder.code(x[k]) << 8 * k;
        return word;
    } else if constexpr (Element::bits == 8) {
        return narrowed_four<Element>(x, encoder.factor);
    } else {
        using Format = SmallFloat<Element::fraction_bits == 2 ? 5 : 4, Element::fraction_bits == 2 ? 2 : 3>;
        constexpr int dropped = Format::fraction_bits - Element::fraction_bits, magnitude_bits = Element::magnitude_bits;
        const float down = power_of_two<float>(Element::bias - Format::bias), factor = exact_product(encoder.factor, down);
        float y[4];
        COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) {
            y[k] = exact_product(x[k], factor);
            if constexpr (dropped > 0) {  // round first: adjacent floats at 1.5 times a power of two are as far apart as the elements
                constexpr int32_t smallest_normal = (127 + 1 - Format::bias) << 23, up = (23 - Element::fraction_bits) << 23 | 1 << 22;
                const float coarse = bits_as<float>(Larger()((bits_as<int32_t>(y[k]) & 0x7f800000) + up, smallest_normal + up));
                const float rounded = y[k] + coarse - coarse;  // +0 for small negative values
                y[k] = bits_as<float>(bits_as<uint32_t>(rounded) | (bits_as<uint32_t>(y[k]) & 0x80000000));
            }
        }
        const uint32_t word = narrowed_pair<Format>(y[0], y[1]) | narrowed_pair<Format>(y[2], y[3]) << 16;
        const uint32_t magnitudes = word >> dropped & in_each_byte(2 * Element::sign - 1);
        // Beyond the largest number is only the next one.
        const uint32_t bounded = magnitudes - (magnitudes >> magnitude_bits & in_each_byte(1));
        return bounded | (word >> (7 - magnitude_bits) & in_each_byte(Element::sign));
    }
}

template <class Element>
__device__ __forceinline__ void four_values(const MX<float>::Decoder<Element>& decoder, uint32_t word, float (&x)[4]) {
    if constexpr (Element::emax == MXInt8::emax) {
        COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) x[k] = decoder.value(static_cast<uint8_t>(word >> 8 * k));
    } else if constexpr (Element::bits == 8) {
        widened_four<Element>(word, decoder.factor, x);
    } else {
        using Format = SmallFloat<4, 3>;
        const uint32_t magnitudes = (word & in_each_byte(Element::sign - 1)) << (Format::fraction_bits - Element::fraction_bits);
        const uint32_t signs = (word & in_each_byte(Element::sign)) << (7 - Element::magnitude_bits);
        widened_four<Format>(magnitudes | signs, power_of_two<float>(Format::bias - Element::bias), x);
        COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) x[k] = exact_product(x[k], decoder.factor);
    }
}
#endif

template <class T>
struct NVFP4Code {
    using Value = T;
    using Codec = NVFP4<T>;
    static constexpr int many = mx_block;
    bool rotated;

    __device__ __forceinline__ explicit NVFP4Code(const Parameters& p) : rotated(first_of(p) == 1) {}

    __device__ __forceinline__ static int64_t record(int64_t i) { return i / nvfp4_block * (nvfp4_header_nbytes + nvfp4_block / 2); }
    __device__ __forceinline__ bool rotates(int count) const { return rotated && count == many; }

    // Encode the values of a thread, which belong to a block with this scale.
    __device__ __forceinline__ void encode(uint8_t* wire, float scale, const Values& at, const T (&x)[many]) const {
        const int run = static_cast<int>(at.i % nvfp4_block) / many;
        uint8_t* to = wire + record(at.i);
        T divisor[2];
        COMPCOLL_UNROLL for (int group = 0; group < 2; ++group) {
            const T largest = largest_of(x, group * nvfp4_group, (group + 1) * nvfp4_group);
            const uint8_t own = Codec::has_codes(scale) ? Codec::group_scale(largest, scale) : 0;
            to[4 + 2 * run + group] = own;
            divisor[group] = Codec::divisor(Codec::unit(own, scale));
        }
        for_eights<T>(at, [&](int eight, int count) {
            uint64_t codes = 0;
            COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) {
                const bool is_coded = k < count && Codec::has_codes(scale);
                codes |= uint64_t(is_coded ? Codec::code(x[8 * eight + k], divisor[eight / 2]) : 0) << 8 * k;
            }
            store_bytes(to + nvfp4_header_nbytes + many / 2 * run + 4 * eight, packed(codes, 4), (count + 1) / 2);
        });
    }
    __device__ __forceinline__ void decode(const uint8_t* wire, const Values& at, T (&x)[many]) const {
        decode(wire, load_value<float>(wire + record(at.i)), at, x);
    }
    __device__ __forceinline__ void decode(const uint8_t* wire, float scale, const Values& at, T (&x)[many]) const {
        const int run = static_cast<int>(at.i % nvfp4_block) / many;
        const uint8_t* from = wire + record(at.i);
        T unit[2];
        COMPCOLL_UNROLL for (int group = 0; group < 2; ++group) unit[group] = Codec::unit(from[4 + 2 * run + group], scale);
        for_eights<T>(at, [&](int eight, int count) {
            const uint64_t codes = unpacked(load_bytes(from + nvfp4_header_nbytes + many / 2 * run + 4 * eight, (count + 1) / 2), 4);
            COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) x[8 * eight + k] = Codec::value(code_in(codes, k), unit[eight / 2]);
        });
        if (rotates(at.count)) rotate_back(x);
        if (Codec::has_codes(scale)) return;
        COMPCOLL_UNROLL for (int k = 0; k < many; ++k) x[k] = Codec::only_value(scale);
    }
};

// Update the residual and store the decoded values, eight at a time.
template <class T>
__device__ __forceinline__ void conclude_run(const Parameters& p, const Values& at, const T (&x)[mx_block], const T (&got)[mx_block]) {
    for_eights<T>(at, [&](int eight, int count) {
        T own[8], decoded[8];
        COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) own[k] = x[8 * eight + k], decoded[k] = got[8 * eight + k];
        conclude(p, Values{at.i + 8 * eight, count}, own, decoded);
    });
}

template <bool plain, class T>
__device__ __forceinline__ void encode_run(const Parameters& p, const MXCode<T>& code, const Values& at) {
    T x[mx_block], y[mx_block];
    wanted<plain>(p, code, at, x);
    COMPCOLL_UNROLL for (int k = 0; k < mx_block; ++k) y[k] = x[k];
    code.encode(p.out, at, y);
    if constexpr (!plain) {
        if (p.residual == nullptr && p.decoded == nullptr) return;
        code.decode(p.out, at, y);  // this thread has just written it
        conclude_run(p, at, x, y);
    }
}

template <bool plain, class T>
__device__ __forceinline__ void encode_by_warp(const Parameters& p, const MXCode<T>& code, int64_t b, int64_t end) {
    COMPCOLL_ROLLED for (b += static_cast<int>(threadIdx.x) % warp_threads; b < end; b += warp_threads) {
        const int64_t i = b * mx_block;
        encode_run<plain>(p, code, Values{i, p.n - i < mx_block ? static_cast<int>(p.n - i) : mx_block});
    }
}

template <bool plain, class T>
__device__ __forceinline__ void encode_blocks(const Parameters& p, const MXCode<T>& code) {
    for_values<mx_block>(p.n, [&](const Values& at) { encode_run<plain>(p, code, at); });
}

// A team of at least 32 threads encodes a block.
template <bool plain, class T>
__device__ __forceinline__ void encode_blocks(const Parameters& p, const NVFP4Code<T>& code) {
    Team team(p.team);
    for (int64_t b = team.index(); b < p.blocks; b += team.count()) {
        const int64_t i = b * nvfp4_block + mx_block * team.rank, end = (b + 1) * nvfp4_block < p.n ? (b + 1) * nvfp4_block : p.n;
        const Values at{i, end - i < mx_block ? static_cast<int>(end - i) : mx_block};
        T x[mx_block] = {}, y[mx_block] = {};
        SignedOf<T> largest[1] = {};
        if (at.count > 0) {
            wanted<plain>(p, code, at, x);
            COMPCOLL_UNROLL for (int k = 0; k < mx_block; ++k) y[k] = x[k];
            if (code.rotates(at.count)) rotate(y);
            largest[0] = magnitude_bits(largest_of(y, 0, mx_block));
        }
        team.reduce(largest, Larger());
        const bool has_rotated = code.rotated && end - b * nvfp4_block >= mx_block;
        const float scale = NVFP4<T>::block_scale(bits_as<T>(largest[0]), has_rotated);
        if (team.rank == 0) store_value(p.out + code.record(b * nvfp4_block), scale);
        if (at.count > 0) {
            code.encode(p.out, scale, at, y);
            if constexpr (!plain) {
                if (p.residual == nullptr && p.decoded == nullptr) continue;
                code.decode(p.out, scale, at, y);  // this thread has just written the rest
                conclude_run(p, at, x, y);
            }
        } else if (team.rank < nvfp4_block / mx_block) {
            store_bytes(p.out + code.record(b * nvfp4_block) + 4 + 2 * team.rank, 0, 2);
        }
    }
}

}  // namespace compcoll
