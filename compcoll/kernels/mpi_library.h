// The MPI library that mpi4py has loaded, called without Python in between. So a call takes the GIL at most once, even beside a
// thread that computes in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace compcoll {

// The addresses of the functions that messages need, and what differs between MPI libraries. Handles of datatypes, communicators
// and operations are ints or pointers, all of one size; the size of a status varies.
struct MPILibrary {
    int (*start)(void* request);
    int (*test)(void* request, int* flag, void* status);
    void* get_count;
    void* iprobe;
    uint64_t byte;
    const void* in_place;
    std::map<std::string, uint64_t, std::less<>> datatypes;  // the reducible ones, by buffer format
    size_t handle_nbytes, status_nbytes;
    nanobind::object error;  // makes an exception from an error code

    // Call `function` with a conversion of handles to this library's type: int or pointer.
    template <class Function>
    int with_handles(Function function) const {
        if (handle_nbytes == sizeof(int)) return function([](uint64_t handle) { return static_cast<int>(handle); });
        return function([](uint64_t handle) { return reinterpret_cast<void*>(handle); });
    }

    // The number of words with room for a status; they are aligned as any status.
    size_t status_words() const { return (status_nbytes + sizeof(uint64_t) - 1) / sizeof(uint64_t); }

    // Raise the error of a code, unless it is MPI_SUCCESS. With or without the GIL.
    void check(int code) const;
};

// A probe for a message of any rank (MPI_Iprobe), by which MPI also advances all other messages.
class MPIProbe {
public:
    MPIProbe(const MPILibrary& library, uint64_t comm, int source, int tag)
        : library_(library), comm_(comm), source_(source), tag_(tag) {}

    // Return whether there is a message. With or without the GIL.
    bool look() const;

private:
    const MPILibrary& library_;
    uint64_t comm_;
    int source_, tag_;
};

void bind_mpi_library(nanobind::module_& m);

}  // namespace compcoll
