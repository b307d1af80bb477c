// Operations on floating-point numbers by their bits, as quantizers need them, without arithmetic that flushing subnormals would
// change.
#pragma once

#include "portable.h"

namespace compcoll {

template <class T>
struct FloatFormat;

template <>
struct FloatFormat<float> {
    using Bits = uint32_t;
    static constexpr int fraction_bits = 23;
    static constexpr int bias = 127;
};

template <>
struct FloatFormat<double> {
    using Bits = uint64_t;
    static constexpr int fraction_bits = 52;
    static constexpr int bias = 1023;
};

template <class T>
COMPCOLL_HD int biased_exponent(T value) {
    using Format = FloatFormat<T>;
    return static_cast<int>(bits_as<typename Format::Bits>(value) >> Format::fraction_bits) & (2 * Format::bias + 1);
}

template <class T>
COMPCOLL_HD bool is_finite(T value) {
    return biased_exponent(value) != 2 * FloatFormat<T>::bias + 1;
}

template <class T>
COMPCOLL_HD T quiet_nan() {
    using Bits = typename FloatFormat<T>::Bits;
    constexpr int fraction_bits = FloatFormat<T>::fraction_bits;
    constexpr Bits all_but_sign = ~Bits(0) >> 1;
    return bits_as<T>(static_cast<Bits>(all_but_sign >> (fraction_bits - 1) << (fraction_bits - 1)));
}

template <class T>
COMPCOLL_HD T greatest_finite() {
    using Format = FloatFormat<T>;
    using Bits = typename Format::Bits;
    return bits_as<T>(static_cast<Bits>((static_cast<Bits>(2 * Format::bias + 1) << Format::fraction_bits) - 1));
}

// +0 for zeros and subnormal numbers, by their bits.
template <class T>
COMPCOLL_HD T without_subnormals(T value) {
    return biased_exponent(value) == 0 ? T(0) : value;
}

// Sums and products that keep subnormal numbers, even on a GPU whose compiler flushes them: for values that no codec has brought
// into a normal range.
COMPCOLL_HD double exact_sum(double a, double b) { return a + b; }
COMPCOLL_HD double exact_product(double a, double b) { return a * b; }

COMPCOLL_HD float exact_sum(float a, float b) {
#if defined(__CUDA_ARCH__)
    float result;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return a + b;
#endif
}

COMPCOLL_HD float exact_product(float a, float b) {
#if defined(__CUDA_ARCH__)
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return a * b;
#endif
}

// The compression error times a factor; 0 if it is not finite (NaN, Inf or an overflowed cast), since later calls cannot make up
// for that.
template <class T>
COMPCOLL_HD T finite_loss(T wanted, T got, T factor) {
    const T loss = exact_product(exact_sum(wanted, -got), factor);
    return loss - loss == T(0) ? loss : T(0);
}

// 2^exponent, which is a normal number.
template <class T>
COMPCOLL_HD T power_of_two(int exponent) {
    using Format = FloatFormat<T>;
    return bits_as<T>(static_cast<typename Format::Bits>(exponent + Format::bias) << Format::fraction_bits);
}

}  // namespace compcoll
