// The MPI library that mpi4py has loaded, called without Python in between: so a call beside a thread that computes in Python needs
// the GIL no more often than once.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace compcoll {

// The functions that messages need, wherever they are, and what differs from library to library: datatypes, communicators and
// operations are numbers or addresses, as long as either, and a status has a size of its own.
struct MPILibrary {
    int (*start)(void* request);
    int (*test)(void* request, int* flag, void* status);
    void* get_count;
    void* iprobe;
    uint64_t byte;         // MPI_BYTE
    const void* in_place;  // MPI_IN_PLACE
    std::map<std::string, uint64_t, std::less<>> datatypes;  // those that MPI reduces, by the format of a buffer
    size_t handle_nbytes, status_nbytes;
    nanobind::object error;  // makes an exception of a code

    // Calls `function` by what handles are here: with a number each, or with an address.
    template <class Function>
    int with_handles(Function function) const {
        if (handle_nbytes == sizeof(int)) return function([](uint64_t handle) { return static_cast<int>(handle); });
        return function([](uint64_t handle) { return reinterpret_cast<void*>(handle); });
    }

    // A status has room in so many words, aligned as any is.
    size_t status_words() const { return (status_nbytes + sizeof(uint64_t) - 1) / sizeof(uint64_t); }

    // Raises what a code says, if it is not MPI_SUCCESS. With or without the GIL.
    void check(int code) const;
};

// A look for a message of any rank's (MPI_Iprobe), by which MPI goes on with all others.
class MPIProbe {
public:
    MPIProbe(const MPILibrary& library, uint64_t comm, int source, int tag)
        : library_(library), comm_(comm), source_(source), tag_(tag) {}

    // Whether there is one. With or without the GIL.
    bool look() const;

private:
    const MPILibrary& library_;
    uint64_t comm_;
    int source_, tag_;
};

void bind_mpi_library(nanobind::module_& m);

}  // namespace compcoll
