// MPI's persistent messages without Python in between (see mpi_library.h), on mpi4py's own handles.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "mpi_library.h"
#include "wait_policy.h"

namespace compcoll {

// One end of a message that is sent or received again and again (MPI-4.1, section 3.9).
class MPIMessage {
public:
    // `address` is that of the request's handle, which mpi4py's object holds. Of a message that comes: from which rank, and, if it
    // must be all of them, how many bytes.
    MPIMessage(const MPILibrary& library, nanobind::object request, uintptr_t address, std::optional<int> source,
               std::optional<size_t> expected);

    void start();

    // Whether it has come, or was sent. With or without the GIL.
    bool test();

    // The same, with patience. Without the GIL, but for the first look.
    bool wait(WaitPolicy& policy);

    // How many bytes came.
    size_t nbytes() const { return nbytes_; }

    // Gives it back to MPI.
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
