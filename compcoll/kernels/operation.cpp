// compcoll.kernels._host.Operation, and operations that call a Python function: see operation.h.
#include "operation.h"

#include <nanobind/stl/tuple.h>

#include <tuple>

#include "python_calls.h"

namespace nb = nanobind;
using namespace compcoll;

namespace {

// A blocking function of input and result, such as a copy.
class Function final : public Operation {
public:
    Function(nb::object function, int64_t wire_nbytes) : function_(function) { account_.wire_nbytes = wire_nbytes; }

    void begin(nb::handle x, nb::handle out, nb::handle, uint64_t) override { call(x, out); }

    void call(nb::handle x, nb::handle out) const { function_(x, out); }

    Account account() const override { return account_; }

private:
    nb::object function_;
    Account account_;
};

// One of MPI's nonblocking collectives.
class Started final : public Operation {
public:
    explicit Started(nb::object start) : start_(start) {}

    void begin(nb::handle x, nb::handle out, nb::handle, uint64_t) override {
        if (!done()) throw nb::value_error("the one before has not ended");
        request_ = start_(x, out);
        test_ = request_.attr("Test");
    }

    bool advance(WaitPolicy& policy) override {
        if (done() || !policy.poll_without_sleeps([&] { return is_true(test_); })) return false;
        request_.reset();
        test_.reset();
        return true;
    }

    bool done() const override { return !request_.is_valid(); }

    Account account() const override { return {-1}; }

private:
    nb::object start_, request_, test_;
};

}  // namespace

void compcoll::bind_operation(nb::module_& m) {
    m.def("poll", [](const nb::object& test, size_t spins, size_t sleeps) {
        return WaitPolicy{spins, sleeps}.poll_python([&] { return is_true(test); });
    }, nb::arg("test"), nb::arg("spins"), nb::arg("sleeps"), "Call `test` until it returns True: `spins` polls, then sleeps of up to `sleeps` ms. Return whether it did.");
    m.def("sleeps_within", &WaitPolicy::sleeps_within, nb::arg("timeout"),
          "Return the limit of `sleeps`, in ms, for a wait of at most `timeout` seconds.");
    nb::class_<Operation>(m, "Operation")
        .def("begin", &Operation::begin, nb::arg("x"), nb::arg("out").none(), nb::arg("residual").none(), nb::arg("number"),
             "Begin a run on some arrays, as the collective of this number.")
        .def("Test", [](Operation& self) {
            WaitPolicy once;
            return self.advance(once);
        }, "Continue until something must be waited for; return whether there was progress.")
        .def_prop_ro("done", &Operation::done, "Whether the run has ended, or none has begun.")
        .def_prop_ro("account", [](const Operation& self) {
            const Account a = self.account();
            return std::tuple(a.wire_nbytes, a.raw_nbytes, a.encode_seconds, a.decode_seconds, a.wait_seconds);
        }, "Of the last run: bytes that left (-1: unknown), bytes they stand for, seconds of encoding, decoding and waiting.");
    nb::class_<PiggybackReduction, Operation>(m, "PiggybackReduction")
        .def_prop_ro("nbytes", &PiggybackReduction::nbytes, "Size of one rank's array in bytes.")
        .def("load", &PiggybackReduction::load, nb::arg("x"), "Load this rank's values.");
    nb::class_<Function, Operation>(m, "Function")
        .def(nb::init<nb::object, int64_t>(), nb::arg("function"), nb::arg("wire_nbytes"))
        .def("__call__", &Function::call, nb::arg("x"), nb::arg("out").none(), "Call it.");
    nb::class_<Started, Operation>(m, "Started").def(nb::init<nb::object>(), nb::arg("start"));
}
