#pragma once

#include <nanobind/nanobind.h>

namespace compcoll {

void bind_at_once(nanobind::module_& m);

}  // namespace compcoll
