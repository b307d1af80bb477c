#pragma once

#include <nanobind/nanobind.h>

namespace compcoll {

void bind_sparse(nanobind::module_& m);

}  // namespace compcoll
