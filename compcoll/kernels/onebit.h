// The onebit codec's arithmetic: the sign of each value, and for each block the values that its signs stand for.
//
// Record of a block of m values:  the value of positive signs, the value of negative signs (little endian; with
// one magnitude for both signs, only that);  m sign bits, 1 for negative, first value in the lowest bit, unused bits zero.
//
//   block                       positive, negative                                    signs
//   holds NaN or Inf            NaN, NaN                                              0
//   largest magnitude is tiny   0, 0                                                  0
//   otherwise                   the means of the values of either sign, 0 for none    the values' (of -0: negative)
//
// Two reconstruction values: F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
// Distributed Training of Speech DNNs", Interspeech 2014. One, the mean magnitude: S. P. Karimireddy et al., "Error
// Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
//
// Means are computed from integers, so that the order of additions does not matter: with 2^e <= M < 2^(e+1) for the largest
// magnitude M, a mean is (Σ q / count)·2^(e-20), where q = x·2^(20-e) rounded toward zero.
#pragma once

#include "magnitude.h"

namespace compcoll {

// The mean of the values of one sign, or of all values, from a sum of the block's fixed-point numbers.
template <class T>
COMPCOLL_HD T mean_of(int64_t sum, int64_t count, T largest) {
    const double mean = count > 0 ? static_cast<double>(sum) / static_cast<double>(count) : 0.0;
    return static_cast<T>(mean) * power_of_two<T>(exponent_of(largest) - FixedPoint<T>::fraction_bits);
}

template <class T>
COMPCOLL_HD uint8_t sign_bit(T value) {
    return static_cast<uint8_t>(bits_as<BitsOf<T>>(value) >> (8 * sizeof(T) - 1));
}

// The values of a block's signs.
template <class T>
struct Reconstruction {
    T positive, negative;
};

// Sums over a block of finite values, not all of them tiny.
struct SignedSums {
    int64_t positive, negative;  // sums of the fixed-point numbers
    int64_t negatives;           // number of negative values

    // Two reconstruction values, or one for both signs.
    template <class T>
    COMPCOLL_HD Reconstruction<T> reconstruction(int count, int64_t n, T largest) const {
        if (count == 2) return {mean_of(positive, n - negatives, largest), mean_of(negative, negatives, largest)};
        const T mean = mean_of(positive - negative, n, largest);
        return {mean, -mean};
    }
};

}  // namespace compcoll
