#pragma once

#include <nanobind/nanobind.h>

namespace compcoll {

void bind_encoded_sum(nanobind::module_& m);

}  // namespace compcoll
