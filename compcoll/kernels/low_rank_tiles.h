// The passes of low_rank_passes.h. Each instruction set compiles them. Everything here is in an unnamed namespace, so that the
// linker never mixes functions of two sets.
//
// A tile is a few rows of some columns, and fits the first-level cache. So memory is read once, whatever the rank.
#pragma once

#include "cast_tiles.h"
#include "low_rank_passes.h"
#include "vectors.h"

namespace compcoll {
namespace {

constexpr size_t tile_rows = 4;
constexpr size_t tile_columns = 128;
constexpr size_t chunk = 4;                 // columns of a left factor processed together
constexpr size_t factor_nbytes = 32 << 10;  // part of a right factor that stays in the nearest caches between the tiles of a strip

template <class T>
constexpr Storage own_storage = sizeof(T) == 8 ? Storage::float64 : Storage::float32;

static_assert(tile_rows * vector_nbytes <= sums_nbytes);

template <size_t n>
struct Count {
    static constexpr size_t value = n;
};

// Call work(k, Count<m>()) for each chunk of a left factor's columns: m columns from the k-th on.
template <class Work>
void for_chunks(size_t rank, const Work& work) {
    size_t k = 0;
    for (; k + chunk <= rank; k += chunk) work(k, Count<chunk>());
    if (rank - k == 1) work(k, Count<1>());
    if (rank - k == 2) work(k, Count<2>());
    if (rank - k == 3) work(k, Count<3>());
}

// Call work(row, Count<m>()) for m rows from `row` on: those of a tile, or one.
template <class Work>
void for_rows(Part part, const Work& work) {
    size_t row = part.row;
    for (; row + tile_rows <= part.end_row; row += tile_rows) work(row, Count<tile_rows>());
    for (; row < part.end_row; ++row) work(row, Count<1>());
}

// Call work(part) for strips of columns for which a right factor stays in a cache.
template <class T, class Work>
void for_strips(Part whole, size_t rank, const Work& work) {
    const size_t fitting = factor_nbytes / (rank * sizeof(T)) / tile_columns * tile_columns;
    const size_t width = fitting < tile_columns ? tile_columns : fitting;
    for (size_t column = whole.column, end; column < whole.end_column; column = end) {
        end = whole.end_column - column < width ? whole.end_column : column + width;
        work(Part{whole.row, whole.end_row, column, end});
    }
}

#define ALWAYS_INLINE __attribute__((always_inline))

// Call work(j, V()) for n values from j on, as many as V has: a vector, shorter ones at the end, or a single value.
template <class T, size_t nbytes = vector_nbytes, class Work>
COMPCOLL_HD void for_vectors(size_t n, const Work& work, size_t j = 0) {
    if constexpr (nbytes == sizeof(T)) {
        if (j < n) work(j, T());
    } else {
        typedef T Vector __attribute__((vector_size(nbytes)));
        for (; j + nbytes / sizeof(T) <= n; j += nbytes / sizeof(T)) work(j, Vector());
        if (j < n) for_vectors<T, nbytes / 2>(n, work, j);
    }
}

template <class T, size_t n>
T sum_of(const T* values) {
    if constexpr (n == 1) {
        return values[0];
    } else {
        typedef T Half __attribute__((vector_size(n / 2 * sizeof(T))));
        T halves[n / 2];
        store(halves, load<Half>(values) + load<Half>(values + n / 2));
        return sum_of<T, n / 2>(halves);
    }
}

// Copies of some rows' elements of a left factor, which cannot alias stores.
template <class T, size_t height, size_t count>
struct Weights {
    T at[height][count];
    Weights(const T* left, size_t rank) {
        for (size_t r = 0; r < height; ++r)
            for (size_t k = 0; k < count; ++k) at[r][k] = left[r * rank + k];
    }
};

// less[r] = base[r] - Σ weights[r][k] · right[k]
template <size_t height, size_t count, class T>
void subtract(const T* base, size_t stride, const Weights<T, height, count> weights, const T* right, size_t columns, size_t n,
              T* less) {
    for_vectors<T>(n, [&]<class V>(size_t j, V) ALWAYS_INLINE {
        V others[count];
        for (size_t k = 0; k < count; ++k) others[k] = load<V>(right + k * columns + j);
        for (size_t r = 0; r < height; ++r) {
            V value = load<V>(base + r * stride + j);
            for (size_t k = 0; k < count; ++k) value -= weights.at[r][k] * others[k];
            store(less + r * tile_columns + j, value);
        }
    });
}

// sums[r][k] += rows[r][j] · right[k][j], separately in each lane
template <size_t height, size_t count, class T>
void add_dots(const T* rows, const T* right, size_t columns, size_t n, T* sums, size_t rank) {
    using Vector = typename VectorOf<T>::Values;
    Vector dots[height][count];
    for (size_t r = 0; r < height; ++r)
        for (size_t k = 0; k < count; ++k) dots[r][k] = load<Vector>(sums + (r * rank + k) * lanes<T>);
    size_t j = 0;
    for (; j + lanes<T> <= n; j += lanes<T>)
        for (size_t k = 0; k < count; ++k) {
            const Vector others = load<Vector>(right + k * columns + j);
            for (size_t r = 0; r < height; ++r) dots[r][k] += load<Vector>(rows + r * tile_columns + j) * others;
        }
    for (size_t r = 0; r < height; ++r)
        for (size_t k = 0; k < count; ++k) {
            T* const sum = sums + (r * rank + k) * lanes<T>;
            store(sum, dots[r][k]);
            for (size_t i = j; i < n; ++i) sum[i - j] += rows[r * tile_columns + i] * right[k * columns + i];
        }
}

// right[k] += Σ weights[r][k] · rows[r]
template <size_t height, size_t count, class T>
void add_rows(const T* rows, const Weights<T, height, count> weights, size_t n, T* right, size_t columns) {
    for_vectors<T>(n, [&]<class V>(size_t j, V) ALWAYS_INLINE {
        V held[height];
        for (size_t r = 0; r < height; ++r) held[r] = load<V>(rows + r * tile_columns + j);
        for (size_t k = 0; k < count; ++k) {
            V sum = load<V>(right + k * columns + j);
            for (size_t r = 0; r < height; ++r) sum += weights.at[r][k] * held[r];
            store(right + k * columns + j, sum);
        }
    });
}

// sum = Σ weights[k] · right[k]; with `more`, sum += the same
template <size_t count, bool more, class T>
void combine(const Weights<T, 1, count> weights, const T* right, size_t columns, size_t n, T* sum) {
    for_vectors<T>(n, [&]<class V>(size_t j, V) ALWAYS_INLINE {
        V value = weights.at[0][0] * load<V>(right + j);
        if (more) value = load<V>(sum + j) + value;
        for (size_t k = 1; k < count; ++k) value += weights.at[0][k] * load<V>(right + k * columns + j);
        store(sum + j, value);
    });
}

// Store values. With `past_caches`, for arrays too large for the caches, memory is written without being read.
template <class T>
void store_values(const T* values, size_t n, T* to, bool past_caches) {
    size_t i = 0;
    if (past_caches) {
        for (const size_t head = before_line(to, n); i < head; ++i) to[i] = values[i];
        i += copy_past_caches(reinterpret_cast<uint8_t*>(to + i), reinterpret_cast<const uint8_t*>(values + i), (n - i) * sizeof(T)) / sizeof(T);
    }
    for (; i < n; ++i) to[i] = values[i];
}

template <class T>
void project(const Summed<T>& summed, size_t columns, size_t rank, Part whole, bool past_caches, Side side, const T* given,
             T* factor, T* sums) {
    alignas(64) T tile[tile_rows * tile_columns];
    const size_t size = storage_size(summed.storage), stride = summed.stride;
    for_strips<T>(whole, rank, [&](Part strip) {
        for_rows(strip, [&](size_t row, auto height) {
            if (side == Side::left) std::memset(sums, 0, height.value * rank * vector_nbytes);
            for (size_t column = strip.column, n; column < strip.end_column; column += n) {
                n = strip.end_column - column < tile_columns ? strip.end_column - column : tile_columns;
                const T* const kept = summed.kept + row * stride + column;
                for (size_t r = 0; r < height.value; ++r) prefetch(kept + r * stride, tile_rows * stride, n);
                for_chunks(rank, [&](size_t k, auto count) {
                    const Weights<T, height.value, count.value> sent(summed.sent_left + row * rank + k, rank);
                    const T* const right = summed.sent_right + k * columns + column;
                    if (k == 0) subtract(kept, stride, sent, right, columns, n, tile);
                    else subtract(tile, tile_columns, sent, right, columns, n, tile);
                });
                for (size_t r = 0; r < height.value; ++r) {
                    T* const total = tile + r * tile_columns;
                    if (summed.gradient != nullptr) {
                        const uint8_t* const gradient = summed.gradient + ((row + r) * columns + column) * size;
                        prefetch(gradient, tile_rows * columns * size, n * size);
                        decode_tile<true, T>(gradient, n, total, total, Config{static_cast<int>(summed.storage)});
                    }
                    store_values(total, n, summed.total + (row + r) * stride + column, past_caches);
                }
                for_chunks(rank, [&](size_t k, auto count) {
                    if (side == Side::left)
                        add_dots<height.value, count.value>(tile, given + k * columns + column, columns, n, sums + k * lanes<T>, rank);
                    if (side == Side::right)
                        add_rows(tile, Weights<T, height.value, count.value>(given + row * rank + k, rank), n,
                                 factor + k * columns + column, columns);
                });
            }
            if (side == Side::left)
                for (size_t i = 0; i < height.value * rank; ++i) factor[row * rank + i] += sum_of<T, lanes<T>>(sums + i * lanes<T>);
        });
    });
    publish();
}

template <class T>
void multiply(const T* left, const T* right, size_t columns, size_t rank, Part whole, bool past_caches, uint8_t* product,
              Storage storage) {
    alignas(64) T values[tile_columns];
    for_strips<T>(whole, rank, [&](Part strip) {
        for (size_t row = strip.row; row < strip.end_row; ++row)
            for (size_t column = strip.column, n; column < strip.end_column; column += n) {
                uint8_t* const to = product + (row * columns + column) * storage_size(storage);
                // All tiles but the first begin at a cache line.
                n = tile_columns - reinterpret_cast<uintptr_t>(to) % 64 / storage_size(storage);
                if (n > strip.end_column - column) n = strip.end_column - column;
                for_chunks(rank, [&](size_t k, auto count) {
                    const Weights<T, 1, count.value> weights(left + row * rank + k, rank);
                    const T* const rows = right + k * columns + column;
                    if (k == 0) combine<count.value, false>(weights, rows, columns, n, values);
                    else combine<count.value, true>(weights, rows, columns, n, values);
                });
                if (storage == own_storage<T>) store_values(values, n, reinterpret_cast<T*>(to), past_caches);
                else encode(values, n, to, Config{static_cast<int>(storage)});
            }
    });
    publish();
}

constexpr LowRankPasses these_low_rank = {{project<float>, multiply<float>}, {project<double>, multiply<double>}};

}  // namespace
}  // namespace compcoll
