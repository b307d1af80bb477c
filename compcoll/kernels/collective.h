#pragma once

#include <nanobind/nanobind.h>

namespace compcoll {

void bind_collective(nanobind::module_& m);

}  // namespace compcoll
