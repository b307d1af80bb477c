// compcoll.kernels._host.MPILibrary: see mpi_library.h.
#include "mpi_library.h"

#include "python_calls.h"

namespace nb = nanobind;
using namespace compcoll;

void MPILibrary::check(int code) const {
    if (code == 0) return;
    const Acquired acquired;
    const nb::object raised = error(code);
    PyErr_SetObject(raised.type().ptr(), raised.ptr());
    throw nb::python_error();
}

void compcoll::bind_mpi_library(nb::module_& m) {
    nb::class_<MPILibrary>(m, "MPILibrary")
        .def("__init__", [](MPILibrary* self, uintptr_t start, uintptr_t test, uintptr_t get_count, uint64_t byte, size_t handle_nbytes,
                            size_t status_nbytes, nb::object error) {
            new (self) MPILibrary{reinterpret_cast<int (*)(void*)>(start), reinterpret_cast<int (*)(void*, int*, void*)>(test),
                                  reinterpret_cast<void*>(get_count), byte, handle_nbytes, status_nbytes, error};
        }, nb::arg("start"), nb::arg("test"), nb::arg("get_count"), nb::arg("byte"), nb::arg("handle_nbytes"),
             nb::arg("status_nbytes"), nb::arg("error"));
}
