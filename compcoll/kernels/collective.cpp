// compcoll.kernels._host.Collective: one call under way, from its handshake to the end of its operation.
#include "collective.h"

#include <nanobind/stl/optional.h>

#include <optional>

#include "exchange.h"
#include "operation.h"
#include "wait_policy.h"
#include "python_calls.h"

namespace nb = nanobind;
using namespace compcoll;

namespace {

// The handshake finds out whether all ranks make the same call, and the highest level of all ranks. If that is this rank's level, the
// operation follows at once. Otherwise the caller decides how to continue.
class Collective {
public:
    // `piggyback` or None travels with the handshake; `operation` or None follows it.
    Collective(nb::object handshake, const nb::bytes& extremes, size_t level, nb::object piggyback, nb::object operation, nb::object x,
               nb::object out, nb::object residual, uint64_t number, size_t spins, size_t sleeps)
        : handshake_object_(handshake), operation_object_(operation), x_(x), out_(out), residual_(residual),
          handshake_(nb::cast<Exchange&>(handshake)), operation_(operation.is_none() ? nullptr : &nb::cast<Operation&>(operation)),
          expected_(level), number_(number), policy_{spins, sleeps} {
        if (!piggyback.is_none()) nb::cast<PiggybackReduction&>(piggyback).load(x);
        handshake_.begin(extremes, piggyback);
        if (operation_ && !operation_->needs_python() && !handshake_.needs_python()) begin_operation();
        advance();
    }

    // Continue until a wait exceeds the policy. Return whether there was progress.
    bool advance() {
        const size_t before = handshake_.position();
        const Stage stage = stage_;
        bool moved = false;
        const bool in_one_go = begun_ && !operation_->needs_python();  // the GIL is released once and taken back once
        try {
            std::optional<Released> released;
            if (in_one_go) released.emplace();
            if (stage_ == Stage::handshake && handshake_.advance(policy_)) end_handshake();
            if (stage_ == Stage::operation && in_one_go) moved = operation_->advance(policy_);
        } catch (...) {
            if (stage_ == Stage::handshake) cancel();
            throw;
        }
        if (stage_ == Stage::agreed) cancel();
        if (stage_ == Stage::operation) {
            if (!begun_) begin_operation();
            WaitPolicy none{0, 0};
            moved = operation_->advance(in_one_go ? none : policy_) || moved;
            if (operation_->done()) end();
        }
        return moved || stage != stage_ || (stage_ == Stage::handshake && before != handshake_.position());
    }

    // Run an operation on these arrays after the handshake.
    void run(nb::object operation, nb::object x, nb::object out, nb::object residual) {
        if (stage_ != Stage::agreed) throw nb::value_error("the handshake has not ended, or the operation runs already");
        operation_object_ = operation;
        operation_ = &nb::cast<Operation&>(operation);
        x_ = x, out_ = out, residual_ = residual;
        stage_ = Stage::operation;
        advance();
    }

    // Return whether the operation has ended, or the handshake has ended and no operation follows.
    bool ended() const { return stage_ == Stage::agreed || stage_ == Stage::done; }
    bool done() const { return stage_ == Stage::done; }
    std::optional<size_t> level() const { return level_; }

private:
    enum class Stage { handshake, agreed, operation, done };

    void begin_operation() {
        operation_->begin(x_, out_, residual_, number_);
        begun_ = true;
    }

    void end_handshake() {
        level_ = handshake_.level();
        stage_ = operation_ && level_ == expected_ ? Stage::operation : Stage::agreed;
    }

    void cancel() {
        if (begun_) operation_->cancel();
        begun_ = false;
    }

    void end() {
        stage_ = Stage::done;
        x_ = out_ = residual_ = nb::none();
    }

    nb::object handshake_object_, operation_object_, x_, out_, residual_;
    Exchange& handshake_;
    Operation* operation_;
    size_t expected_;
    uint64_t number_;
    WaitPolicy policy_;
    Stage stage_ = Stage::handshake;
    bool begun_ = false;
    std::optional<size_t> level_;
};

}  // namespace

void compcoll::bind_collective(nb::module_& m) {
    nb::class_<Collective>(m, "Collective")
        .def(nb::init<nb::object, const nb::bytes&, size_t, nb::object, nb::object, nb::object, nb::object, nb::object, uint64_t, size_t,
                      size_t>(),
             nb::arg("handshake"), nb::arg("extremes"), nb::arg("level"), nb::arg("piggyback").none(), nb::arg("operation").none(),
             nb::arg("x").none(), nb::arg("out").none(), nb::arg("residual").none(), nb::arg("number"), nb::arg("spins"), nb::arg("sleeps"))
        .def("Test", &Collective::advance, "Continue until something must be waited for; return whether there was progress.")
        .def("run", &Collective::run, nb::arg("operation"), nb::arg("x"), nb::arg("out"), nb::arg("residual").none(),
             "Run an operation after the handshake.")
        .def_prop_ro("ended", &Collective::ended, "Whether the operation has ended, or the handshake has and no operation follows.")
        .def_prop_ro("done", &Collective::done, "Whether the operation has ended.")
        .def_prop_ro("level", &Collective::level, "The highest level of all ranks; None before the handshake's end, and if their calls differ.");
}
