// The codecs whose blocks have a header, with the interface of device_blocks.h.
#pragma once

#include "codecs.h"
#include "device_mx.h"
#include "minmax.h"
#include "onebit.h"
#include "philox.h"
#include "qsgd.h"

namespace compcoll {

template <class T>
struct MinMaxCode : BlockCodec<MinMaxCode<T>, MinMax<T>> {
    using Header = Bounds<T>;
    using Signed = SignedOf<T>;
    static constexpr int maxima_count = 2;
    static constexpr Signed least = static_cast<Signed>(~all_but_sign<T>);
    using BlockCodec<MinMaxCode, MinMax<T>>::BlockCodec;

    // Map bits to an order of numbers, with -0 below +0 and NaN beyond the infinities. It is its own inverse.
    __device__ __forceinline__ static Signed ordered(Signed bits) {
        return bits ^ (bits >> (8 * sizeof(T) - 1) & static_cast<Signed>(all_but_sign<T>));
    }
    template <int many>
    __device__ __forceinline__ static void survey(const T (&x)[many], int count, Signed (&maxima)[2]) {
        COMPCOLL_UNROLL for (int k = 0; k < many; ++k) {
            if (k >= count) continue;
            const Signed number = ordered(bits_as<Signed>(x[k]));
            maxima[0] = Larger()(maxima[0], number);
            maxima[1] = Larger()(maxima[1], static_cast<Signed>(~number));
        }
    }
    __device__ __forceinline__ Header header(const Signed (&maxima)[2], const int64_t (&)[1], int) const {
        const T largest = bits_as<T>(ordered(maxima[0])), smallest = bits_as<T>(ordered(static_cast<Signed>(~maxima[1])));
        return bounds_on_wire(smallest, largest, is_finite(largest) && is_finite(smallest));
    }
    __device__ __forceinline__ static void store_header(uint8_t* record, Header bounds) {
        store_value(record, bounds.lo);
        store_value(record + sizeof(T), bounds.hi);
    }
    __device__ __forceinline__ static Header load_header(const uint8_t* record) {
        return {load_value<T>(record), load_value<T>(record + sizeof(T))};
    }
};

struct Halves {
    uint32_t words[4];
};

template <class T>
struct QSGDCode : BlockCodec<QSGDCode<T>, QSGD<T>> {
    using Signed = SignedOf<T>;
    static constexpr bool with_random = true;
    static constexpr int staged_header = sizeof(T);
    int variant;
    uint64_t seed, rng_counter, position;

    __device__ __forceinline__ explicit QSGDCode(const Parameters& p)
        : BlockCodec<QSGDCode, QSGD<T>>(p), variant(variant_of(p)), seed(p.seed), rng_counter(p.rng_counter), position(p.position) {}

    __device__ __forceinline__ bool needs_sums(const Signed (&maxima)[1]) const {
        const T largest = bits_as<T>(maxima[0]);
        return variant & qsgd_euclidean && is_finite(largest) && !is_tiny(largest);
    }
    template <int many>
    __device__ __forceinline__ static void add_up(const T (&x)[many], const Signed (&maxima)[1], int64_t (&sums)[1]) {
        const FixedPoint<T> fixed(bits_as<T>(maxima[0]));
        COMPCOLL_UNROLL for (int k = 0; k < many; ++k) sums[0] += static_cast<int64_t>(fixed.square(x[k]));
    }
    __device__ __forceinline__ T header(const Signed (&maxima)[1], const int64_t (&sums)[1], int) const {
        return this->codec.header(bits_as<T>(maxima[0]), variant, [&](FixedPoint<T>) { return static_cast<uint64_t>(sums[0]); });
    }
    // 16 random bits for each of the eight values from the i-th on.
    __device__ __forceinline__ Halves random_at(int64_t i) const {
        constexpr uint32_t halves = qsgd_half << 16 | qsgd_half;
        if (variant & qsgd_nearest) return {{halves, halves, halves, halves}};
        const RandomBlock block(seed, rng_counter, (position + static_cast<uint64_t>(i)) / 8);
        return {{block.words[0], block.words[1], block.words[2], block.words[3]}};
    }
};

template <class T>
struct OneBit {
    using Value = T;
    using Header = Reconstruction<T>;
    static constexpr int bits = 1;
    int reconstructions;

    COMPCOLL_HD explicit OneBit(int first) : reconstructions(first) {}
};

template <class T>
struct OneBitCode : BlockCodec<OneBitCode<T>, OneBit<T>> {
    using Header = Reconstruction<T>;
    using Signed = SignedOf<T>;
    static constexpr int sums_count = 2;
    static constexpr int positive_bits = 42;  // for 2^20 values below 2^21; the number of negative values is in the bits above

    __device__ __forceinline__ explicit OneBitCode(const Parameters& p)
        : BlockCodec<OneBitCode, OneBit<T>>(p, first_of(p) * static_cast<int>(sizeof(T))) {}

    __device__ __forceinline__ static bool needs_sums(const Signed (&maxima)[1]) {
        const T largest = bits_as<T>(maxima[0]);
        return is_finite(largest) && !is_tiny(largest);
    }
    template <int many>
    __device__ __forceinline__ static void add_up(const T (&x)[many], const Signed (&maxima)[1], int64_t (&sums)[2]) {
        static_assert(many <= 256, "the sums of a thread are kept in 32 bits");
        const FixedPoint<T> fixed(bits_as<T>(maxima[0]));
        int32_t all = 0, positive = 0, negatives = 0;
        COMPCOLL_UNROLL for (int k = 0; k < many; ++k) {  // missing values are +0
            const int32_t q = fixed.of(x[k]);
            all += q;
            positive += q > 0 ? q : 0;
            negatives += sign_bit(x[k]);
        }
        sums[0] += positive + (int64_t(negatives) << positive_bits);
        sums[1] += all - positive;
    }
    __device__ __forceinline__ Header header(const Signed (&maxima)[1], const int64_t (&sums)[2], int count) const {
        const T largest = bits_as<T>(maxima[0]);
        if (!is_finite(largest)) return {quiet_nan<T>(), quiet_nan<T>()};
        if (is_tiny(largest)) return {T(0), T(0)};
        const SignedSums all{sums[0] & ((int64_t(1) << positive_bits) - 1), sums[1], sums[0] >> positive_bits};
        return all.reconstruction(this->codec.reconstructions, int64_t(count), largest);
    }
    __device__ __forceinline__ void store_header(uint8_t* record, Header by_sign) const {
        store_value(record, by_sign.positive);
        if (this->codec.reconstructions == 2) store_value(record + sizeof(T), by_sign.negative);
    }
    __device__ __forceinline__ Header load_header(const uint8_t* record) const {
        const T positive = load_value<T>(record);
        return {positive, this->codec.reconstructions == 2 ? load_value<T>(record + sizeof(T)) : -positive};
    }
    struct Encoder {
        COMPCOLL_HD uint8_t code(T x) const { return sign_bit(x); }
    };
    struct Decoder {
        Header by_sign;
        COMPCOLL_HD T value(uint8_t code) const { return code ? by_sign.negative : by_sign.positive; }
    };
    // Blocks without a mean store no signs.
    template <class Use>
    __device__ __forceinline__ void with_encoder(Header by_sign, Use use) const {
        const bool tiny = magnitude_bits(by_sign.positive) == 0 && magnitude_bits(by_sign.negative) == 0;
        if (tiny || !is_finite(by_sign.positive)) use(NoCode());
        else use(Encoder());
    }
    template <class Use>
    __device__ __forceinline__ void with_decoder(Header by_sign, Use use) const {
        if (!is_finite(by_sign.positive) || !is_finite(by_sign.negative)) use(OneValue<T>{quiet_nan<T>()});
        else use(Decoder{by_sign});
    }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <class Format>
__device__ __forceinline__ uint32_t four_codes(const FP8<float>::Encoder<Format>& encoder, const float (&x)[4]) {
    static_assert(Format::below_overflow == 0x77, "what decodes to infinity is 0x78, all of whose exponent bits but one are set");
    const uint32_t word = narrowed_four<Format>(x, encoder.factor);
    if (encoder.most != Format::below_overflow) return word;
    return word - ((word & word >> 1 & word >> 2 & word >> 3 & 0x08080808) >> 3);
}
template <class Format>
__device__ __forceinline__ void four_values(const FP8<float>::Decoder<Format>& decoder, uint32_t word, float (&x)[4]) {
    widened_four<Format>(word, decoder.factor, x);
}
#endif

// A codec of scaled_tiles.h.
template <class Codec>
struct ScaledCode : BlockCodec<ScaledCode<Codec>, Codec> {
    using Value = typename Codec::Value;
    static constexpr int staged_header = sizeof(typename Codec::Header);
    using BlockCodec<ScaledCode, Codec>::BlockCodec;

    __device__ __forceinline__ typename Codec::Header header(const SignedOf<Value> (&maxima)[1], const int64_t (&)[1], int) const {
        return this->codec.header(bits_as<Value>(maxima[0]));
    }
};

#define COMPCOLL_CODE(codec, Name, ...) \
    template <class T>                  \
    using Name##Code = ScaledCode<Name<T>>;
COMPCOLL_EACH_SCALED_CODEC(COMPCOLL_CODE)
#undef COMPCOLL_CODE

// Aliases by the names of codecs.
#define COMPCOLL_CODE(codec, Name, ...) \
    template <class T>                  \
    using codec##_code = Name##Code<T>;
COMPCOLL_EACH_BLOCK_CODEC(COMPCOLL_CODE)
#undef COMPCOLL_CODE

}  // namespace compcoll
