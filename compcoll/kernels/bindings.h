// What host.cpp binds to Python, where nothing else includes it.
#pragma once

#include <nanobind/nanobind.h>

namespace compcoll {

void bind_collective(nanobind::module_& m);
void bind_integer_quantizer(nanobind::module_& m);
void bind_low_rank(nanobind::module_& m);
void bind_mpi_reduction(nanobind::module_& m);
void bind_program(nanobind::module_& m);
void bind_shared_sum(nanobind::module_& m);
void bind_sparse(nanobind::module_& m);
void bind_szp(nanobind::module_& m);

}  // namespace compcoll
