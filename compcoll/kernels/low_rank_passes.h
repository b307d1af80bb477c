// The contract of the passes over a gradient as a matrix that give and take its low-rank factors: a left one of rows × rank and
// a right one of rank × columns. All instruction sets give the same totals and products; sums along rows differ by rounding.
#pragma once

#include "tile.h"

namespace compcoll {

enum class Side : int { neither = 0, left = 1, right = 2 };

// A range of a matrix's rows and columns.
struct Part {
    size_t row, end_row, column, end_column;
};

// A gradient and what was lost before it, which is `kept` less the product of the factors that were sent.
template <class T>
struct Summed {
    const uint8_t* gradient;  // or null
    Storage storage;          // its elements'
    const T* kept;
    const T* sent_left;
    const T* sent_right;
    T* total;
    size_t stride;  // from row to row of `kept` and `total`
};

constexpr size_t sums_nbytes = 256;  // of a left factor's element

template <class T>
struct LowRankFunctions {
    // Stores the total, and adds to one factor what the other gives: sums along the part's rows to a left one, along its
    // columns to a right one. `sums` is memory for sums_nbytes times rank.
    void (*project)(const Summed<T>& summed, size_t columns, size_t rank, Part part, bool past_caches, Side side, const T* given,
                    T* factor, T* sums);
    // Stores the product of two factors.
    void (*multiply)(const T* left, const T* right, size_t columns, size_t rank, Part part, bool past_caches, uint8_t* product,
                     Storage storage);
};

struct LowRankPasses {
    LowRankFunctions<float> f32;
    LowRankFunctions<double> f64;
};

extern const LowRankPasses low_rank_portable;
#if defined(COMPCOLL_X86)
extern const LowRankPasses low_rank_avx2, low_rank_avx512;
#endif

}  // namespace compcoll
