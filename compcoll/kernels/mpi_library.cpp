// compcoll.kernels._host.MPILibrary: see mpi_library.h.
#include "mpi_library.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <utility>
#include <vector>

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

bool MPIProbe::look() const {
    int flag = 0;
    std::vector<uint64_t> status(library_.status_words());
    library_.check(library_.with_handles([&](auto handle) {
        const auto iprobe = reinterpret_cast<int (*)(int, int, decltype(handle(0)), int*, void*)>(library_.iprobe);
        return iprobe(source_, tag_, handle(comm_), &flag, status.data());
    }));
    return flag;
}

void compcoll::bind_mpi_library(nb::module_& m) {
    nb::class_<MPILibrary>(m, "MPILibrary")
        .def("__init__", [](MPILibrary* self, uintptr_t start, uintptr_t test, uintptr_t get_count, uintptr_t iprobe, uint64_t byte,
                            intptr_t in_place, decltype(MPILibrary::datatypes) datatypes, size_t handle_nbytes, size_t status_nbytes,
                            nb::object error) {
            new (self) MPILibrary{reinterpret_cast<int (*)(void*)>(start), reinterpret_cast<int (*)(void*, int*, void*)>(test),
                                  reinterpret_cast<void*>(get_count), reinterpret_cast<void*>(iprobe), byte,
                                  reinterpret_cast<const void*>(in_place), std::move(datatypes), handle_nbytes, status_nbytes, error};
        }, nb::arg("start"), nb::arg("test"), nb::arg("get_count"), nb::arg("iprobe"), nb::arg("byte"), nb::arg("in_place"),
             nb::arg("datatypes"), nb::arg("handle_nbytes"), nb::arg("status_nbytes"), nb::arg("error"));
    nb::class_<MPIProbe>(m, "MPIProbe")
        .def(nb::init<const MPILibrary&, uint64_t, int, int>(), nb::keep_alive<1, 2>(), nb::arg("library"), nb::arg("comm"),
             nb::arg("source"), nb::arg("tag"))
        .def("__call__", [](const MPIProbe& self) { const Released released; return self.look(); }, "Whether there is a message.");
}
