// The codecs whose blocks have a header, with the interface of device_blocks.h.
#pragma once

#include "codecs.h"
#include "device_blocks.h"
#include "minmax.h"
#include "onebit.h"
#include "philox.h"
#include "qsgd.h"

namespace compcoll {

// The largest magnitude, compared by its bits: NaN is larger than Inf.
template <class T, int many>
__device__ __forceinline__ void survey_magnitudes(const T (&x)[many], typename SignedBits<T>::type (&maxima)[1]) {
    using Signed = typename SignedBits<T>::type;
    using Bits = typename FloatFormat<T>::Bits;
    COMPCOLL_UNROLL for (int k = 0; k < many; ++k)
        maxima[0] = Larger()(maxima[0], static_cast<Signed>(bits_as<Bits>(x[k]) & (~Bits(0) >> 1)));
}

template <int nbytes>
struct UnsignedOf;
template <>
struct UnsignedOf<2> { using type = uint16_t; };
template <>
struct UnsignedOf<4> { using type = uint32_t; };
template <>
struct UnsignedOf<8> { using type = uint64_t; };

template <class T>
struct MinMaxCode : SurveyedCodec<MinMaxCode<T>> {
    using Value = T;
    using Header = Bounds<T>;
    using Signed = typename SignedBits<T>::type;
    static constexpr int maxima_count = 2;
    static constexpr Signed least = static_cast<Signed>(typename FloatFormat<T>::Bits(1) << (8 * sizeof(T) - 1));
    int levels;

    __device__ __forceinline__ explicit MinMaxCode(const Parameters& p)
        : SurveyedCodec<MinMaxCode>(Layout(second_of(p), first_of(p), 2 * sizeof(T))), levels((1 << first_of(p)) - 1) {}

    // Map bits to an order of numbers, with -0 below +0 and NaN beyond the infinities. It is its own inverse.
    __device__ __forceinline__ static Signed ordered(Signed bits) {
        return bits ^ (bits >> (8 * sizeof(T) - 1) & static_cast<Signed>(~typename FloatFormat<T>::Bits(0) >> 1));
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
    template <class Use>
    __device__ __forceinline__ void with_encoder(Header bounds, Use use) const {
        if (!bounds.finite() || bounds.equal()) use(NoCode());
        else if (bounds.huge()) use(Quantizer<T, true>(bounds, levels));
        else use(Quantizer<T, false>(bounds, levels));
    }
    template <class Use>
    __device__ __forceinline__ void with_decoder(Header bounds, Use use) const {
        if (!bounds.finite() || bounds.equal()) use(OneValue<T>{bounds.finite() ? bounds.lo : quiet_nan<T>()});
        else if (bounds.huge()) use(Dequantizer<T, true>(bounds, levels));
        else use(Dequantizer<T, false>(bounds, levels));
    }
};

struct Halves {
    uint32_t words[4];
};

template <class T>
struct QSGDCode : BlockCodec<QSGDCode<T>> {
    static constexpr bool with_random = true;
    using Value = T;
    using Header = T;  // half the distance between levels
    using Signed = typename SignedBits<T>::type;
    static constexpr int maxima_count = 1, sums_count = 1, staged_header = sizeof(T);
    static constexpr Signed least = 0;
    int levels, variant;
    uint64_t seed, rng_counter, position;

    __device__ __forceinline__ explicit QSGDCode(const Parameters& p)
        : BlockCodec<QSGDCode>(Layout(second_of(p), first_of(p), sizeof(T))), levels(qsgd_levels(first_of(p))), variant(variant_of(p)),
          seed(p.seed), rng_counter(p.rng_counter), position(p.position) {}

    template <int many>
    __device__ __forceinline__ static void survey(const T (&x)[many], int, Signed (&maxima)[1]) { survey_magnitudes(x, maxima); }
    __device__ __forceinline__ bool needs_sums(const Signed (&maxima)[1]) const {
        const T largest = bits_as<T>(maxima[0]);
        return variant & qsgd_euclidean && is_finite(largest) && !is_tiny(largest);
    }
    template <int many>
    __device__ __forceinline__ static void add_up(const T (&x)[many], const Signed (&maxima)[1], int64_t (&sums)[1]) {
        const FixedPoint<T> fixed(bits_as<T>(maxima[0]));
        COMPCOLL_UNROLL for (int k = 0; k < many; ++k) sums[0] += static_cast<int64_t>(fixed.square(x[k]));
    }
    __device__ __forceinline__ Header header(const Signed (&maxima)[1], const int64_t (&sums)[1], int) const {
        const T largest = bits_as<T>(maxima[0]);
        if (!is_finite(largest)) return quiet_nan<T>();
        if (is_tiny(largest)) return T(0);
        double norm = mantissa_of(largest);
        if (variant & qsgd_euclidean) {
            const double root = root_of_squares(static_cast<uint64_t>(sums[0]));
            norm = root > norm ? root : norm;
        }
        return qsgd_half_step(largest, norm, levels);
    }
    __device__ __forceinline__ static void store_header(uint8_t* record, T h) { store_value(record, h); }
    __device__ __forceinline__ static T load_header(const uint8_t* record) { return load_value<T>(record); }
    // 16 random bits for each of the eight values from the i-th on.
    __device__ __forceinline__ Halves random_at(int64_t i) const {
        if (variant & qsgd_nearest) return {{0x80008000, 0x80008000, 0x80008000, 0x80008000}};
        const RandomBlock block(seed, rng_counter, (position + static_cast<uint64_t>(i)) / 8);
        return {{block.words[0], block.words[1], block.words[2], block.words[3]}};
    }
    __device__ __forceinline__ bool is_random() const { return !(variant & qsgd_nearest); }

    struct Decoder {
        T h;
        int levels;
        COMPCOLL_HD T value(uint8_t code) const { return qsgd_value(code, h, levels); }
    };
    template <class Use>
    __device__ __forceinline__ void with_encoder(T h, Use use) const {
        if (!is_finite(h) || biased_exponent(h) == 0) use(NoCode());
        else use(StochasticQuantizer<T>(h, levels));
    }
    template <class Use>
    __device__ __forceinline__ void with_decoder(T h, Use use) const {
        if (!is_finite(h) || biased_exponent(h) == 0) use(OneValue<T>{is_finite(h) ? T(0) : quiet_nan<T>()});
        else use(Decoder{h, levels});
    }
};

template <class T>
struct OneBitCode : BlockCodec<OneBitCode<T>> {
    using Value = T;
    using Header = Reconstruction<T>;
    using Signed = typename SignedBits<T>::type;
    using Bits = typename FloatFormat<T>::Bits;
    static constexpr int maxima_count = 1, sums_count = 2;
    static constexpr int positive_bits = 42;  // for 2^20 values below 2^21; the number of negative values is in the bits above
    static constexpr Signed least = 0;
    int reconstructions;

    __device__ __forceinline__ explicit OneBitCode(const Parameters& p)
        : BlockCodec<OneBitCode>(Layout(second_of(p), 1, first_of(p) * static_cast<int>(sizeof(T)))), reconstructions(first_of(p)) {}

    __device__ __forceinline__ static bool is_negative(T x) { return bits_as<Bits>(x) >> (8 * sizeof(T) - 1) != 0; }

    template <int many>
    __device__ __forceinline__ static void survey(const T (&x)[many], int, Signed (&maxima)[1]) { survey_magnitudes(x, maxima); }
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
            negatives += is_negative(x[k]);
        }
        sums[0] += positive + (int64_t(negatives) << positive_bits);
        sums[1] += all - positive;
    }
    __device__ __forceinline__ Header header(const Signed (&maxima)[1], const int64_t (&sums)[2], int count) const {
        const T largest = bits_as<T>(maxima[0]);
        if (!is_finite(largest)) return {quiet_nan<T>(), quiet_nan<T>()};
        if (is_tiny(largest)) return {T(0), T(0)};
        const SignedSums all{sums[0] & ((int64_t(1) << positive_bits) - 1), sums[1], sums[0] >> positive_bits};
        return reconstructions == 2 ? all.of_each_sign(int64_t(count), largest) : all.of_magnitudes(int64_t(count), largest);
    }
    __device__ __forceinline__ void store_header(uint8_t* record, Header by_sign) const {
        store_value(record, by_sign.positive);
        if (reconstructions == 2) store_value(record + sizeof(T), by_sign.negative);
    }
    __device__ __forceinline__ Header load_header(const uint8_t* record) const {
        const T positive = load_value<T>(record);
        return {positive, reconstructions == 2 ? load_value<T>(record + sizeof(T)) : -positive};
    }
    struct Encoder {
        COMPCOLL_HD uint8_t code(T x) const { return static_cast<uint8_t>(bits_as<Bits>(x) >> (8 * sizeof(T) - 1)); }
    };
    struct Decoder {
        Header by_sign;
        COMPCOLL_HD T value(uint8_t code) const { return code ? by_sign.negative : by_sign.positive; }
    };
    // Blocks without a mean store no signs.
    template <class Use>
    __device__ __forceinline__ void with_encoder(Header by_sign, Use use) const {
        const bool tiny = bits_as<Bits>(by_sign.positive) << 1 == 0 && bits_as<Bits>(by_sign.negative) << 1 == 0;
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
// fp8 by the GPU's conversions, whose results equal those of Float8 for numbers that are not below the smallest code.
__device__ __forceinline__ uint32_t narrowed_pair(E4M3, float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ uint32_t narrowed_pair(E5M2, float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ uint32_t widened_pair(E4M3, uint16_t pair) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}
__device__ __forceinline__ uint32_t widened_pair(E5M2, uint16_t pair) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}

template <class Format>
__device__ __forceinline__ uint32_t four_codes(const FP8<float>::Encoder<Format>& encoder, const float (&x)[4]) {
    static_assert(Format::below_overflow == 0x77, "what decodes to infinity is 0x78, all of whose exponent bits but one are set");
    const float by = encoder.factor;
    const uint32_t word = narrowed_pair(Format(), x[0] * by, x[1] * by) | narrowed_pair(Format(), x[2] * by, x[3] * by) << 16;
    if (encoder.most != Format::below_overflow) return word;
    return word - ((word & word >> 1 & word >> 2 & word >> 3 & 0x08080808) >> 3);
}
template <class Format>
__device__ __forceinline__ void four_values(const FP8<float>::Decoder<Format>& decoder, uint32_t word, float (&x)[4]) {
    COMPCOLL_UNROLL for (int pair = 0; pair < 2; ++pair) {
        const uint32_t halves = widened_pair(Format(), static_cast<uint16_t>(word >> 16 * pair));
        COMPCOLL_UNROLL for (int k = 0; k < 2; ++k) {
            float value;
            asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(halves >> 16 * k)));
            x[2 * pair + k] = value * decoder.factor;
        }
    }
}
#endif

// A codec's struct, as described in scaled_tiles.h.
template <class Codec>
struct ScaledCode : SurveyedCodec<ScaledCode<Codec>> {
    using Value = typename Codec::Value;
    using Header = typename Codec::Header;
    using Signed = typename SignedBits<Value>::type;
    static constexpr int maxima_count = 1, staged_header = sizeof(Header);
    static constexpr Signed least = 0;
    Codec codec;

    __device__ __forceinline__ explicit ScaledCode(const Parameters& p)
        : SurveyedCodec<ScaledCode>(Layout(second_of(p), 8, sizeof(Header))), codec(first_of(p)) {}

    template <int many>
    __device__ __forceinline__ static void survey(const Value (&x)[many], int, Signed (&maxima)[1]) { survey_magnitudes(x, maxima); }
    __device__ __forceinline__ Header header(const Signed (&maxima)[1], const int64_t (&)[1], int) const {
        return codec.header(bits_as<Value>(maxima[0]));
    }
    __device__ __forceinline__ static void store_header(uint8_t* record, Header header) {
        store_bytes(record, bits_as<typename UnsignedOf<sizeof(Header)>::type>(header), sizeof(Header));
    }
    __device__ __forceinline__ static Header load_header(const uint8_t* record) {
        return bits_as<Header>(static_cast<typename UnsignedOf<sizeof(Header)>::type>(load_bytes(record, sizeof(Header))));
    }
    template <class Use>
    __device__ __forceinline__ void with_encoder(Header header, Use use) const {
        if (codec.is_zero(header) || codec.is_nan(header)) use(NoCode());
        else codec.with_encoder(header, use);
    }
    template <class Use>
    __device__ __forceinline__ void with_decoder(Header header, Use use) const {
        if (codec.is_nan(header)) use(OneValue<Value>{quiet_nan<Value>()});
        else if (codec.is_zero(header)) use(OneValue<Value>{Value(0)});
        else codec.with_decoder(header, use);
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
