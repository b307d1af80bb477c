#pragma once

#include <nanobind/nanobind.h>

namespace compcoll {

void bind_integer_quantizer(nanobind::module_& m);

}  // namespace compcoll
