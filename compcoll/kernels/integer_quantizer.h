// Values as integers that any allreduce can sum. Levels are multiples of a step, from a scale that all ranks share for each block.
// Votes are 0 against, 1 for neither and 2 in favour, in fields as wide as the sum of all ranks needs.
#pragma once

#include "magnitude.h"

namespace compcoll {

// Round to the nearest integer, ties to even.
#if defined(__CUDACC__)
COMPCOLL_HD float to_integer(float x) { return rintf(x); }
COMPCOLL_HD double to_integer(double x) { return rint(x); }
#else
COMPCOLL_HD float to_integer(float x) { return __builtin_rintf(x); }
COMPCOLL_HD double to_integer(double x) { return __builtin_rint(x); }
#endif

template <class T>
struct IntegerSteps {
    T levels, step, inverse;

    // `largest` is the block's largest magnitude on all ranks. The step is NaN if any value is not finite, and 0 if all are tiny.
    COMPCOLL_HD IntegerSteps(T largest, int32_t levels)
        : levels(static_cast<T>(levels)),
          step(!is_finite(largest) ? quiet_nan<T>() : is_tiny(largest) ? T(0) : exact_quotient(largest, this->levels)),
          inverse(step > T(0) ? exact_quotient(T(1), step) : T(0)) {}

    COMPCOLL_HD T level(T x) const {
        const T nearest = to_integer(exact_product(x, inverse));
        if (!is_finite(nearest)) return T(0);
        return nearest > levels ? levels : nearest < -levels ? -levels : nearest;
    }
    COMPCOLL_HD T value(int32_t level) const { return exact_product(static_cast<T>(level), step); }
    COMPCOLL_HD T lost(T x, T level) const { return finite_loss(x, exact_product(level, step), T(1)); }
};

template <class T>
COMPCOLL_HD uint32_t vote(T x) {
    return static_cast<uint32_t>(x >= T(0)) + static_cast<uint32_t>(x > T(0));
}

template <class T>
COMPCOLL_HD T verdict(uint32_t votes, uint32_t ranks) {
    // No branches, as votes are unpredictable.
    return static_cast<T>(static_cast<int>(votes > ranks) - static_cast<int>(votes < ranks));
}

}  // namespace compcoll
