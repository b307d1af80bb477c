// compcoll.kernels._host: the kernels as Python functions on NumPy memory. They release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "crc32c.h"
#include "exchange.h"
#include "gathered.h"
#include "host_coder.h"
#include "instruction_sets.h"
#include "operation.h"
#include "mpi_library.h"
#include "mpi_message.h"
#include "shared_message.h"

namespace nb = nanobind;
using namespace compcoll;

NB_MODULE(_host, m) {
    m.doc() = "Codec kernels on host memory.";
    // Communicators cached as attributes of MPI communicators outlive the interpreter; nanobind would report a leak.
    nb::set_leak_warnings(false);
    m.def("instruction_sets", [] {
        std::vector<std::string> names;
        for (const auto& [name, set] : all_sets)
            if (supported(set)) names.emplace_back(name);
        return names;
    }, "Names of the instruction sets that this CPU can run, slowest first; a coder takes their index.");
    m.def("crc32c", [](const Readable& bytes, bool portable) {
        const auto* at = static_cast<const uint8_t*>(bytes.data());
        const size_t n = bytes.nbytes();
        const nb::gil_scoped_release released;
        return portable ? crc32c_portable(at, n) : crc32c(at, n);
    }, nb::arg("bytes"), nb::arg("portable") = false,
       "CRC-32C of some memory; by the CPU's instruction, where it has one, unless `portable`.");
    bind_operation(m);
    bind_exchange(m);
    bind_shared_message(m);
    bind_mpi_library(m);
    bind_mpi_message(m);
    bind_mpi_reduction(m);
    bind_gathered(m);
    bind_collective(m);
    bind_shared_sum(m);
    bind_sparse(m);
    bind_szp(m);
    bind_integer_quantizer(m);
    bind_host_coder(m);
    bind_low_rank(m);
    bind_program(m);
}
