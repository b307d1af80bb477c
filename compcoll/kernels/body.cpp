// compcoll.kernels._host.Body and what is one by calling a function: see body.h.
#include "body.h"

#include <nanobind/stl/tuple.h>

#include <tuple>
#include <utility>

#include "python_calls.h"

namespace nb = nanobind;
using namespace compcoll;

namespace {

// A function of input and result that returns when all is done, such as a copy or MPI's own reduction.
class Function final : public Body {
public:
    Function(nb::object function, int64_t wire_nbytes) : function_(function) { account_.wire_nbytes = wire_nbytes; }

    void begin(nb::handle x, nb::handle out, nb::handle, uint64_t, Patience) override { call(x, out); }

    void call(nb::handle x, nb::handle out) const { function_(x, out); }

    Account account() const override { return account_; }

private:
    nb::object function_;
    Account account_;
};

// One of MPI's nonblocking collectives.
class Started final : public Body {
public:
    explicit Started(nb::object start) : start_(start) {}

    void begin(nb::handle x, nb::handle out, nb::handle, uint64_t, Patience patience) override {
        if (!done()) throw nb::value_error("the one before has not ended");
        request_ = start_(x, out);
        test_ = request_.attr("Test");
        patience_ = patience;
    }

    bool advance() override {
        if (done() || !patience_.ask_without_naps([&] { return is_true(test_); })) return false;
        request_.reset();
        test_.reset();
        return true;
    }

    bool done() const override { return !request_.is_valid(); }

    Account account() const override { return {-1}; }

private:
    nb::object start_, request_, test_;
    Patience patience_;
};

}  // namespace

void compcoll::bind_body(nb::module_& m) {
    m.def("poll", [](const nb::object& test, size_t looks, size_t naps) {
        return Patience{looks, naps}.ask([&] { return is_true(test); });
    }, nb::arg("test"), nb::arg("looks"), nb::arg("naps"), "Call it until it tells True, with so much patience; whether it did.");
    m.def("naps_within", &Patience::naps_within, nb::arg("timeout"),
          "The most milliseconds of naps in a wait that may last so many seconds.");
    nb::class_<Body>(m, "Body")
        .def("begin", [](Body& self, nb::handle x, nb::handle out, nb::handle residual, uint64_t number, size_t looks,
                         size_t naps, nb::object then) {
            self.then = nb::object();
            self.begin(x, out, residual, number, {looks, naps});
            if (!then.is_none()) self.then = then;
        }, nb::arg("x"), nb::arg("out"), nb::arg("residual").none(), nb::arg("number"), nb::arg("looks"), nb::arg("naps"),
             nb::arg("then") = nb::none(),
             "Begin to run on some arrays, as the collective of this number, with so much patience. Who iterates over it calls `then` with "
             "it at its end.")
        .def("run_ahead", &Body::run_ahead, nb::arg("x"), nb::arg("number"),
             "Do what of a run can be done before all ranks are known to make the same call: nothing with feedback.")
        .def("Test", &Body::advance,
             "Go on until something must be waited for; whether there was any progress. As something to wait for it has come "
             "each time that it moved, and is asked again.")
        .def_prop_ro("done", &Body::done, "Whether it has run to its end, or has not begun.")
        .def("__iter__", [](nb::object self) { return self; })
        .def("__next__", [](nb::object self) {
            Body& body = nb::cast<Body&>(self);
            if (!body.done()) body.advance();
            if (!body.done()) return self;
            if (const nb::object then = std::exchange(body.then, nb::object()); then.is_valid()) then(self);
            PyErr_SetNone(PyExc_StopIteration);  // nanobind's own has a text, which would be a result
            throw nb::python_error();
        }, "Itself, which has gone on and must be waited for, until it is done.")
        .def_prop_ro("account", [](const Body& self) {
            const Account a = self.account();
            return std::tuple(a.wire_nbytes, a.raw_nbytes, a.fresh_nbytes, a.encode_seconds, a.decode_seconds, a.wait_seconds);
        }, "The last run's bytes that left (-1: unknown), those they stand for, those it used first, and seconds of encoding, decoding and waiting.");
    nb::class_<Along, Body>(m, "Along")
        .def_prop_ro("nbytes", &Along::nbytes, "On the way, each time.")
        .def("load", &Along::load, nb::arg("x"), nb::arg("residual").none() = nb::none(), nb::arg("number") = 0,
             "Take this rank's values, as the collective of this number.");
    nb::class_<Function, Body>(m, "Function")
        .def(nb::init<nb::object, int64_t>(), nb::arg("function"), nb::arg("wire_nbytes"))
        .def("__call__", &Function::call, nb::arg("x"), nb::arg("out"), "Call it.");
    nb::class_<Started, Body>(m, "Started").def(nb::init<nb::object>(), nb::arg("start"));
}
