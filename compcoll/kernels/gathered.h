#pragma once

#include <nanobind/nanobind.h>

namespace compcoll {

void bind_gathered(nanobind::module_& m);

}  // namespace compcoll
