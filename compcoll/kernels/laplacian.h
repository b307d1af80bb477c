// A distribution with the moments of some values, for the threshold above which a part of them lies.
#pragma once

#include <algorithm>
#include <cmath>

#include "sparse_passes.h"

namespace compcoll {

// The estimate of the threshold; |μ|; the largest magnitude of the values; in which length the tail falls to 1/e there; and the
// other distribution's estimate.
struct Fit {
    double threshold, mean, largest, scale, second;
};

// b · ln(cosh(μ/b) / η) of a Laplacian distribution, or the threshold of a normal one without mean, whose quantile for that density
// is told, where the mean magnitude says that the tail is lighter.
inline Fit fit(const Moments& moments, double n, double density, double quantile) {
    constexpr double light = 0.753;  // mean magnitude by standard deviation: √½ of a Laplacian distribution, √(2/π) of a normal one
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
