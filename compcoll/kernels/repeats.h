#pragma once

#include <nanobind/nanobind.h>

namespace compcoll {

void bind_repeats(nanobind::module_& m);

}  // namespace compcoll
