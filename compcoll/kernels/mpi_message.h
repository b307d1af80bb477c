// MPI's persistent messages, without Python in between (see mpi_library.h), on mpi4py's handles.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "mpi_library.h"
#include "wait_policy.h"

namespace compcoll {

// One end of a persistent message (MPI-4.1, section 3.9).
class MPIMessage {
public:
    // `address` is the address of the request's handle inside mpi4py's object. A receive also has the rank of its `source`, and in
    // `expected` its size in bytes if that is fixed.
    MPIMessage(const MPILibrary& library, nanobind::object request, uintptr_t address, std::optional<int> source,
               std::optional<size_t> expected);

    void start();

    // Return whether the message has arrived or was sent. With or without the GIL.
    bool test();

    // Wait for the message as the policy allows. Without the GIL, except for the first test.
    bool wait(WaitPolicy& policy);

    // The number of bytes received.
    size_t nbytes() const { return nbytes_; }

    // Free the MPI request.
    void free() { request_.attr("Free")(); }

private:
    size_t came() const;

    const MPILibrary& library_;
    nanobind::object request_;
    void* handle_;
    std::optional<int> source_;
    std::optional<size_t> expected_;
    std::vector<uint64_t> status_;
    size_t nbytes_ = 0;
};

void bind_mpi_message(nanobind::module_& m);

}  // namespace compcoll
