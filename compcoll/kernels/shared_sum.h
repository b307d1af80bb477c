#pragma once

#include <nanobind/nanobind.h>

namespace compcoll {

void bind_shared_sum(nanobind::module_& m);

}  // namespace compcoll
