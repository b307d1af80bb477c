// compcoll.kernels._host.MPIMessage: see mpi_message.h.
#include "mpi_message.h"

#include <nanobind/stl/optional.h>

#include <string>

#include "python_calls.h"

namespace nb = nanobind;
using namespace compcoll;

MPIMessage::MPIMessage(const MPILibrary& library, nb::object request, uintptr_t address, std::optional<int> source,
                       std::optional<size_t> expected)
    : library_(library), request_(request), handle_(reinterpret_cast<void*>(address)), source_(source), expected_(expected),
      status_(library.status_words()) {}

void MPIMessage::start() { library_.check(library_.start(handle_)); }

bool MPIMessage::test() {
    int flag = 0;
    library_.check(library_.test(handle_, &flag, status_.data()));
    if (!flag || !source_) return flag;
    nbytes_ = came();
    if (!expected_ || nbytes_ == *expected_) return true;
    const Acquired acquired;
    const std::string text = std::to_string(nbytes_) + " bytes came from rank " + std::to_string(*source_) + ", where " +
                             std::to_string(*expected_) + " are expected";
    PyErr_SetString(nb::module_::import_("compcoll.errors").attr("WireCorrupted").ptr(), text.c_str());
    throw nb::python_error();
}

bool MPIMessage::wait(WaitPolicy& policy) {
    if (test()) return true;
    if (policy.spins <= 1 && !policy.may_sleep()) return false;
    const Released released;
    return policy.poll_mpi([this] { return test(); });
}

// MPI_Get_count takes the datatype by value, so its type depends on the library.
size_t MPIMessage::came() const {
    int count = 0;
    library_.check(library_.with_handles([&](auto handle) {
        using Handle = decltype(handle(0));
        return reinterpret_cast<int (*)(const void*, Handle, int*)>(library_.get_count)(status_.data(), handle(library_.byte), &count);
    }));
    return static_cast<size_t>(count);
}

void compcoll::bind_mpi_message(nb::module_& m) {
    nb::class_<MPIMessage>(m, "MPIMessage")
        .def(nb::init<const MPILibrary&, nb::object, uintptr_t, std::optional<int>, std::optional<size_t>>(), nb::keep_alive<1, 2>(),
             nb::arg("library"), nb::arg("request"), nb::arg("address"), nb::arg("source").none(), nb::arg("expected").none())
        .def("Start", [](MPIMessage& self) { const Released released; self.start(); }, "Send or receive it once more.")
        .def("Test", [](MPIMessage& self) { const Released released; return self.test(); }, "Whether it has come, or was sent.")
        .def("Free", &MPIMessage::free, "Give it back to MPI.")
        .def_prop_ro("nbytes", &MPIMessage::nbytes, "How many bytes came last.");
}
