#pragma once

#include <nanobind/nanobind.h>

namespace compcoll {

void bind_summands(nanobind::module_& m);

}  // namespace compcoll
