// The MPI library that mpi4py has loaded, called without Python in between: so a call beside a thread that computes in Python needs
// the GIL no more often than once.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

namespace compcoll {

// The functions that messages need, wherever they are, and what differs from library to library: datatypes, communicators and
// operations are numbers or addresses, as long as either, and a status has a size of its own.
struct MPILibrary {
    int (*start)(void* request);
    int (*test)(void* request, int* flag, void* status);
    void* get_count;
    uint64_t byte;  // MPI_BYTE
    size_t handle_nbytes, status_nbytes;
    nanobind::object error;  // makes an exception of a code

    // Calls `function` by what handles are here: with a number each, or with an address.
    template <class Function>
    int with_handles(Function function) const {
        if (handle_nbytes == sizeof(int)) return function([](uint64_t handle) { return static_cast<int>(handle); });
        return function([](uint64_t handle) { return reinterpret_cast<void*>(handle); });
    }

    // Raises what a code says, if it is not MPI_SUCCESS. With or without the GIL.
    void check(int code) const;
};

void bind_mpi_library(nanobind::module_& m);

}  // namespace compcoll
