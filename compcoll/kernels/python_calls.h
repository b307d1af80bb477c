// Python functions without arguments, which are messages' own.
#pragma once

#include <nanobind/nanobind.h>

namespace compcoll {

inline nanobind::object call(const nanobind::object& function) {
    PyObject* result = PyObject_CallNoArgs(function.ptr());
    if (!result) throw nanobind::python_error();
    return nanobind::steal(result);
}

inline bool is_true(const nanobind::object& test) { return call(test).ptr() == Py_True; }

}  // namespace compcoll
