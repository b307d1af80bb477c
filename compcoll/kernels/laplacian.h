// A distribution fitted to the moments of values, to estimate the threshold that a given share of the values exceeds.
#pragma once

#include <algorithm>
#include <cmath>

#include "sparse_passes.h"

namespace compcoll {

// The estimated threshold; |μ|; the largest magnitude of the values; the distance over which the tail falls to 1/e at
// the threshold; and the threshold that the other distribution gives.
struct Fit {
    double threshold, mean, largest, scale, second;
};

// Estimate the threshold as b · ln(cosh(μ/b) / η) of a Laplacian distribution. If the mean magnitude indicates a lighter tail, use
// that of a zero-mean normal distribution, whose quantile for this density is `quantile`.
inline Fit fit(const Moments& moments, double n, double density, double quantile) {
    constexpr double light = 0.753;  // mean magnitude / standard deviation: √½ for a Laplacian distribution, √(2/π) for a normal
                                     // one
    const double largest = moments.largest, signed_mean = moments.sum / n, power = moments.square / n;
    const double b = std::sqrt(std::max(power - signed_mean * signed_mean, 0.0) / 2);
    const double mean = std::min(std::abs(signed_mean), largest);
    if (!(b > 0 && std::isfinite(b))) return {largest / 2, mean, largest, 0, 0};
    const double ratio = std::abs(signed_mean) / b;
    const double laplacian = std::min(b * (ratio + std::log1p(std::exp(-2 * ratio)) - std::log(2 * density)), largest);
    const double wide = std::sqrt(power), normal = std::min(wide * quantile, largest);
    if (normal > 0 && moments.absolute > light * wide * n) return {normal, mean, largest, wide * wide / normal, laplacian};
    return {laplacian, mean, largest, b, normal};
}

}  // namespace compcoll
