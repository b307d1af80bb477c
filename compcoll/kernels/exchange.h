#pragma once

#include <nanobind/nanobind.h>

namespace compcoll {

void bind_exchange(nanobind::module_& m);

}  // namespace compcoll
