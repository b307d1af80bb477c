// The minmax codec's loops, written for the compiler's vectorizer. Each instruction set compiles them. Everything here is in an
// unnamed namespace, so that the linker never mixes functions of two sets.
#pragma once

#include "blocks.h"
#include "minmax.h"

namespace compcoll {
namespace {

// The smallest and largest of some values, and whether all are finite. A Value is a T or a vector of T.
template <class Value, class Bits>
struct Extremes {
    Value smallest, largest;
    Bits not_finite;  // not 0 once a value was NaN or Inf

    COMPCOLL_HD explicit Extremes(Value x) : smallest(x), largest(x), not_finite(bits_as<Bits>(x - x)) {}

    COMPCOLL_HD void take(Value x) { merge(Extremes(x)); }

    COMPCOLL_HD void merge(const Extremes& other) {  // with the operand order of minps and maxps
        smallest = other.smallest < smallest ? other.smallest : smallest;
        largest = other.largest > largest ? other.largest : largest;
        not_finite |= other.not_finite;
    }
};

template <class T>
Bounds<T> bounds_of(const T* values, size_t n) {
    using Values = typename VectorOf<T>::Values;
    using InLanes = Extremes<Values, typename VectorOf<T>::Bits>;
    constexpr size_t lanes = sizeof(Values) / sizeof(T), step = 4 * lanes;  // four chains hide the latency

    Extremes<T, BitsOf<T>> all(load<T>(values));
    size_t i = 0;
    if (n >= step) {
        const auto at = [values](size_t index) { return load<Values>(values + index); };
        InLanes a(at(0)), b(at(lanes)), c(at(2 * lanes)), d(at(3 * lanes));
        for (i = step; i + step <= n; i += step) {
            a.take(at(i));
            b.take(at(i + lanes));
            c.take(at(i + 2 * lanes));
            d.take(at(i + 3 * lanes));
        }
        a.merge(b);
        c.merge(d);
        a.merge(c);
        for (size_t lane = 0; lane < lanes; ++lane) {
            all.take(a.smallest[lane]);
            all.take(a.largest[lane]);
            all.not_finite |= a.not_finite[lane];
        }
    }
    for (; i < n; ++i) all.take(load<T>(values + i));
    return bounds_on_wire(all.smallest, all.largest, all.not_finite == 0);
}

template <class T>
void encode(const T* values, size_t n, uint8_t* wire, Config config) {
    encode_blocks(MinMax<T>(config.first), values, n, static_cast<size_t>(config.second), wire, bounds_of<T>,
                  [values](auto encoder, size_t i, size_t m, uint8_t* codes) { quantize(values + i, m, encoder, codes); });
}

template <class T>
constexpr TileFunctions<T> functions = {encode<T>, decode_blocks<MinMax, false, T>, decode_blocks<MinMax, true, T>};

constexpr Kernels these_minmax = {functions<float>, functions<double>};

}  // namespace
}  // namespace compcoll
