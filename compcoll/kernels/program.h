#pragma once

#include <nanobind/nanobind.h>

namespace compcoll {

void bind_program(nanobind::module_& m);

}  // namespace compcoll
