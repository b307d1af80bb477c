// Arithmetic on a codec's input and residual. Each instruction set compiles it. Everything here is in an unnamed namespace, so that
// the linker never mixes functions of two sets.
#pragma once

#include "floats.h"
#include "tile.h"
#include "unaligned.h"

namespace compcoll {
namespace {

template <class T>
void multiply(T* values, size_t n, T factor) {
    for (size_t i = 0; i < n; ++i) values[i] *= factor;
}

template <class T>
void add(const T* a, const T* b, size_t n, T* sums) {
    SAME_OR_APART for (size_t i = 0; i < n; ++i) store(sums + i, load<T>(a + i) + load<T>(b + i));
}

template <class T>
void keep_loss(const T* wanted, const T* got, size_t n, T factor, bool feed, T* kept) {
    if (feed) {
        SAME_OR_APART for (size_t i = 0; i < n; ++i) store(kept + i, finite_loss(load<T>(wanted + i), load<T>(got + i), factor));
    } else {
        SAME_OR_APART for (size_t i = 0; i < n; ++i)
            store(kept + i, load<T>(kept + i) + finite_loss(load<T>(wanted + i), load<T>(got + i), factor));
    }
}

constexpr Sums these_sums = {{multiply<float>, add<float>, keep_loss<float>}, {multiply<double>, add<double>, keep_loss<double>}};

}  // namespace
}  // namespace compcoll
