#pragma once

#include <nanobind/nanobind.h>

namespace compcoll {

void bind_mpi_reduction(nanobind::module_& m);

}  // namespace compcoll
