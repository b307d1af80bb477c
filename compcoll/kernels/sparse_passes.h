// The interface of the passes over a whole buffer that selection needs. All instruction sets give the same results: the order of
// additions does not depend on the length of vectors.
#pragma once

#include "per_type.h"
#include "sparse.h"

namespace compcoll {

// Moments of the finite values.
struct Moments {
    double sum, absolute, square;  // sums of the values, of their magnitudes, of their squares
    double largest;                // largest magnitude
};

template <class T>
struct SparseFunctions {
    using Threshold = SignedOf<T>;  // of a finite magnitude

    Moments (*moments)(const T* values, size_t n);
    // Count the magnitudes above the threshold, including NaN and Inf.
    size_t (*count)(const T* values, size_t n, Threshold threshold);
    // Write the ascending indices of these, at most `capacity`, and return their full number.
    size_t (*compact)(const T* values, size_t n, Threshold threshold, uint32_t* indices, size_t capacity);
    // The same for values with |r| > threshold and r² > alpha · v, and for values that are not finite.
    size_t (*unambiguous)(const T* values, const T* variances, size_t n, T alpha, Threshold threshold, uint32_t* indices,
                          size_t capacity);
};

using SparsePasses = PerType<SparseFunctions>;

extern const SparsePasses sparse_portable, sparse_avx2, sparse_avx512;

}  // namespace compcoll
