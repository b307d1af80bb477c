// One-dimensional arrays that Python passes, and checks of what it passes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace compcoll {

template <class T>
using Array = nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

inline void require(bool condition, const char* what) {
    if (!condition) throw nanobind::value_error(what);
}

}  // namespace compcoll
