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
    using Signed = int32_t;
    static constexpr int fraction_bits = 23;
    static constexpr int bias = 127;
};

template <>
struct FloatFormat<double> {
    using Bits = uint64_t;
    using Signed = int64_t;
    static constexpr int fraction_bits = 52;
    static constexpr int bias = 1023;
};

// Integers as wide as T.
template <class T> using BitsOf = typename FloatFormat<T>::Bits;
template <class T> using SignedOf = typename FloatFormat<T>::Signed;

template <class T> constexpr BitsOf<T> all_but_sign = ~BitsOf<T>(0) >> 1;
template <class T> constexpr SignedOf<T> infinity_bits = SignedOf<T>(2 * FloatFormat<T>::bias + 1) << FloatFormat<T>::fraction_bits;
template <class T> constexpr BitsOf<T> quiet_nan_bits =
    all_but_sign<T> >> (FloatFormat<T>::fraction_bits - 1) << (FloatFormat<T>::fraction_bits - 1);

// The bits of a value without its sign. Compared as integers, NaN is larger than Inf.
template <class T>
COMPCOLL_HD SignedOf<T> magnitude_bits(T value) {
    return static_cast<SignedOf<T>>(bits_as<BitsOf<T>>(value) & all_but_sign<T>);
}

template <class T>
COMPCOLL_HD int biased_exponent(T value) {
    using Format = FloatFormat<T>;
    return static_cast<int>(bits_as<BitsOf<T>>(value) >> Format::fraction_bits) & (2 * Format::bias + 1);
}

template <class T>
COMPCOLL_HD bool is_finite(T value) {
    return biased_exponent(value) != 2 * FloatFormat<T>::bias + 1;
}

template <class T>
COMPCOLL_HD T quiet_nan() {
    constexpr BitsOf<T> bits = quiet_nan_bits<T>;
    return bits_as<T>(bits);
}

template <class T>
COMPCOLL_HD T greatest_finite() {
    return bits_as<T>(infinity_bits<T> - 1);
}

// +0 for zeros and subnormal numbers, by their bits.
template <class T>
COMPCOLL_HD T without_subnormals(T value) {
    return biased_exponent(value) == 0 ? T(0) : value;
}

// Sums, products and quotients that keep subnormal numbers, even on a GPU whose compiler flushes them: for values that no codec has brought
// into a normal range.
COMPCOLL_HD double exact_sum(double a, double b) { return a + b; }
COMPCOLL_HD double exact_product(double a, double b) { return a * b; }
COMPCOLL_HD double exact_quotient(double a, double b) { return a / b; }

#if defined(__CUDA_ARCH__)
COMPCOLL_HD float exact_sum(float a, float b) {
    float result;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
COMPCOLL_HD float exact_product(float a, float b) {
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
COMPCOLL_HD float exact_quotient(float a, float b) {
    float result;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
#else
COMPCOLL_HD float exact_sum(float a, float b) { return a + b; }
COMPCOLL_HD float exact_product(float a, float b) { return a * b; }
COMPCOLL_HD float exact_quotient(float a, float b) { return a / b; }
#endif

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
    return bits_as<T>(static_cast<BitsOf<T>>(exponent + Format::bias) << Format::fraction_bits);
}

}  // namespace compcoll
