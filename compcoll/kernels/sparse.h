// The arithmetic of sparsification on single values: magnitudes, the power-of-two value code, and random indices.
//
// Magnitudes are compared as integers, the bits of a float without its sign: NaN and Inf are then larger than all other
// values, and no comparison depends on how subnormal numbers are treated.
#pragma once

#include "floats.h"

namespace compcoll {

// Conditions on a value; NaN and Inf always meet them. A threshold is the bits of a finite magnitude.
template <class T>
COMPCOLL_HD bool is_above(T value, SignedOf<T> threshold) {
    return magnitude_bits(value) > threshold;
}

// |r| > threshold and r² > alpha · v, where v >= 0.
template <class T>
COMPCOLL_HD bool is_unambiguous(T r, T v, SignedOf<T> threshold, T alpha) {
    const auto magnitude = magnitude_bits(r);
    return magnitude > threshold && (magnitude >= infinity_bits<T> ||
                                     magnitude_bits(exact_product(r, r)) > magnitude_bits(exact_product(alpha, v)));
}

// The bits of a threshold, at most the largest finite magnitude: all values that are not finite are above it.
template <class T>
COMPCOLL_HD SignedOf<T> threshold_bits(double threshold) {
    const auto bits = magnitude_bits(static_cast<T>(threshold));
    return bits < infinity_bits<T> ? bits : infinity_bits<T> - 1;
}

// The rest of a value after a part was sent; 0 if it is not finite.
template <class T>
COMPCOLL_HD T rest_of(T value, T sent) {
    const T rest = exact_sum(value, bits_as<T>(bits_as<BitsOf<T>>(sent) ^ ~all_but_sign<T>));
    return magnitude_bits(rest) < infinity_bits<T> ? rest : T(0);
}

// The first `moment_values` values are summed in T by `moment_lanes` lanes, the i-th value by lane i % moment_lanes, and so on for
// the next ones. Then these sums are added in double.
template <class T>
constexpr uint32_t moment_lanes = 256 / sizeof(T);
template <class T>
constexpr uint32_t moment_values = 65536 / sizeof(T);

// A hash of 64 bits: the finalizer of splitmix64.
// G. L. Steele, D. Lea, C. H. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
COMPCOLL_HD uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

constexpr uint64_t sample_run = 16;
// Where the i-th run begins in a stratified sample of n values: `runs` runs of sample_run neighbours.
COMPCOLL_HD uint64_t sample_begin(uint64_t n, uint64_t runs, uint64_t i) {
    const uint64_t share = n / runs, slack = share - sample_run;
    return share * i + (slack == 0 ? 0 : mixed(i) % (slack + 1));
}

// The 4-bit value code: sign and 3 bits of exponent below that of the largest magnitude sent.
// Y. Tsuzuku, H. Imachi, T. Akiba, "Variance-based Gradient Compression for Efficient Distributed Deep Learning",
// ICLR 2018 workshop, section 4.2.
constexpr int power_codes = 8;

// Biased exponent of the power of two nearest to a value; 0 if the value is too small.
template <class T>
COMPCOLL_HD int nearest_power(T value) {
    constexpr SignedOf<T> half = SignedOf<T>(1) << (FloatFormat<T>::fraction_bits - 1);
    return static_cast<int>((magnitude_bits(value) + half) >> FloatFormat<T>::fraction_bits);
}

// The code of a finite value; `top` is the biased exponent of the largest magnitude. -1 if the value has no code.
template <class T>
COMPCOLL_HD int power_code(T value, int top) {
    const int nearest = nearest_power(value), power = nearest < top ? nearest : top;
    if (power < 1 || top - power >= power_codes) return -1;
    return (bits_as<SignedOf<T>>(value) < 0 ? power_codes : 0) | (top - power);
}

// The value of a code; a power below the smallest normal number is 0.
template <class T>
COMPCOLL_HD T power_value(int code, int top) {
    const int power = top - (code & (power_codes - 1));
    const BitsOf<T> bits = power < 1 ? 0 : BitsOf<T>(power) << FloatFormat<T>::fraction_bits;
    return bits_as<T>(bits | BitsOf<T>(code >> 3) << (8 * sizeof(T) - 1));
}

// Element `index` of a random permutation of 0 … n - 1: a Feistel network over an even number of bits, repeated while its result is
// outside. J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.
COMPCOLL_HD uint64_t permuted(uint64_t index, uint64_t n, uint64_t key) {
    int half = 1;
    while (half < 32 && (n - 1) >> (2 * half) != 0) ++half;
    const uint64_t mask = (uint64_t(1) << half) - 1;
    do {
        uint64_t left = index >> half, right = index & mask;
        for (uint64_t round = 0; round < 6; ++round) {
            const uint64_t next = left ^ (mixed(key ^ mixed(round << 56 | right)) & mask);
            left = right;
            right = next;
        }
        index = left << half | right;
    } while (index >= n);
    return index;
}

}  // namespace compcoll
