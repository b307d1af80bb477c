// The interface of passes over a gradient matrix that compute its low-rank factors or multiply them: a left factor of rows × rank
// and a right one of rank × columns. All instruction sets give the same totals and products; sums along rows differ by rounding.
#pragma once

#include "tile.h"

namespace compcoll {

enum class Side : int { neither = 0, left = 1, right = 2 };

// A range of rows and columns of a matrix.
struct Part {
    size_t row, end_row, column, end_column;
};

// A gradient and the residual to add to it: `kept` minus the product of the factors that were sent.
template <class T>
struct Summed {
    const uint8_t* gradient;  // may be null
    Storage storage;          // of the gradient's elements
    const T* kept;
    const T* sent_left;
    const T* sent_right;
    T* total;
    size_t stride;  // between rows of `kept` and `total`, in elements
};

constexpr size_t sums_nbytes = 256;  // per element of a left factor

template <class T>
struct LowRankFunctions {
    // Store the total. From `given`, one factor, add to `factor`, the other one: sums along the part's rows to a left factor, along
    // its columns to a right one. `sums` is memory of sums_nbytes times rank.
    void (*project)(const Summed<T>& summed, size_t columns, size_t rank, Part part, bool past_caches, Side side, const T* given,
                    T* factor, T* sums);
    // Store the product of two factors.
    void (*multiply)(const T* left, const T* right, size_t columns, size_t rank, Part part, bool past_caches, uint8_t* product,
                     Storage storage);
};

using LowRankPasses = PerType<LowRankFunctions>;

extern const LowRankPasses low_rank_portable, low_rank_avx2, low_rank_avx512;

}  // namespace compcoll
