// The interface of the passes over a whole buffer that the szp codec needs. All instruction sets give the same results.
#pragma once

#include <cstddef>

#include "per_type.h"
#include "szp.h"

namespace compcoll {

// A wire whose length has been checked, and its next block: a pass moves that on.
struct SzpWire {
    const uint8_t* firsts;
    const uint8_t* widths;
    const uint8_t* block;
};

// The sum of an array times a scale and some wires; the array may be null.
template <class T>
struct SzpTerms {
    size_t n;
    const T* add;
    double scale;
    T limit;  // values of the array up to this magnitude become integers; others make their block raw
    double step;
    SzpWire* wires;
    size_t count;  // of the wires
};

template <class T>
struct SzpFunctions {
    // Write the wire of the terms, without its step, and return its length in bytes.
    size_t (*encode)(const SzpTerms<T>& terms, uint8_t* wire);
    // Store the sum of the terms, rounded once.
    void (*decode)(const SzpTerms<T>& terms, T* values);
};

using SzpPasses = PerType<SzpFunctions>;

extern const SzpPasses szp_portable, szp_avx2, szp_avx512;

}  // namespace compcoll
