#pragma once

#include <nanobind/nanobind.h>

namespace compcoll {

void bind_low_rank(nanobind::module_& m);

}  // namespace compcoll
