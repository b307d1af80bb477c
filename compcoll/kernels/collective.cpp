// compcoll.kernels._host.Collective: one call under way, from its handshake to the end of its operation.
#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <tuple>
#include <utility>

#include "exchange.h"
#include "operation.h"
#include "wait_policy.h"
#include "python_calls.h"
#include "stopwatch.h"

namespace nb = nanobind;
using namespace compcoll;

namespace {

// The calls of one kind: a handshake, then an operation. One run at a time, each on arrays of its own.
//
// The handshake finds out whether all ranks make the same call, and the highest level of all ranks. If that is this rank's level, the
// operation follows at once. Otherwise the caller decides how to continue.
class Collective {
public:
    // `piggyback` or None travels with the handshake; `operation` or None follows it. `traced`: whether to record the times of a run.
    Collective(nb::object handshake, nb::bytes extremes, size_t level, nb::object piggyback, nb::object operation, bool traced)
        : handshake_object_(handshake), piggyback_object_(piggyback), operation_object_(operation), extremes_(extremes),
          handshake_(nb::cast<Exchange&>(handshake)),
          piggyback_(piggyback.is_none() ? nullptr : &nb::cast<PiggybackReduction&>(piggyback)),
          operation_(operation.is_none() ? nullptr : &nb::cast<Operation&>(operation)), expected_(level), traced_(traced) {}

    // Begin a run, and continue until a wait exceeds the policy. Return whether the operation has ended.
    bool begin(nb::object x, nb::object out, nb::object residual, uint64_t number, size_t spins, size_t sleeps) {
        x_ = x, out_ = out, residual_ = residual;
        number_ = number;
        policy_ = {spins, sleeps};
        stage_ = Stage::handshake;
        level_.reset();
        begun_ = false;
        if (traced_) [[unlikely]] times_ = {seconds_now(), 0.0, 0.0};
        if (piggyback_) piggyback_->load(x);
        handshake_.begin(extremes_, piggyback_object_);
        if (operation_ && !operation_->needs_python() && !handshake_.needs_python()) begin_operation();
        advance();
        return done();
    }

    // Continue until a wait exceeds the policy of this run. Return whether there was progress.
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

    // The same, with a policy for this wait only.
    bool advance(size_t spins, size_t sleeps) {
        const WaitPolicy usual = std::exchange(policy_, WaitPolicy{spins, sleeps});
        const bool moved = advance();
        policy_ = usual;
        return moved;
    }

    // Return whether the operation has ended, or the handshake has ended and no operation follows.
    bool ended() const { return stage_ == Stage::agreed || stage_ == Stage::done; }
    bool done() const { return stage_ == Stage::done; }
    std::optional<size_t> level() const { return level_; }

    // When the last run began, and when its handshake and its operation ended, if it is traced. 0: not reached.
    std::tuple<double, double, double> times() const { return times_; }

private:
    enum class Stage { handshake, agreed, operation, done };

    void begin_operation() {
        operation_->begin(x_, out_, residual_, number_);
        begun_ = true;
    }

    void end_handshake() {
        level_ = handshake_.level();
        if (traced_) [[unlikely]] std::get<1>(times_) = seconds_now();
        stage_ = operation_ && level_ == expected_ ? Stage::operation : Stage::agreed;
    }

    void cancel() {
        if (begun_) operation_->cancel();
        begun_ = false;
        x_ = out_ = residual_ = nb::none();
    }

    void end() {
        stage_ = Stage::done;
        if (traced_) [[unlikely]] std::get<2>(times_) = seconds_now();
        x_ = out_ = residual_ = nb::none();
    }

    nb::object handshake_object_, piggyback_object_, operation_object_, x_, out_, residual_;
    nb::bytes extremes_;
    Exchange& handshake_;
    PiggybackReduction* piggyback_;
    Operation* operation_;
    size_t expected_;
    uint64_t number_ = 0;
    WaitPolicy policy_;
    Stage stage_ = Stage::done;
    bool begun_ = false;
    std::optional<size_t> level_;
    const bool traced_;
    std::tuple<double, double, double> times_{};
};

}  // namespace

void compcoll::bind_collective(nb::module_& m) {
    nb::class_<Collective>(m, "Collective")
        .def(nb::init<nb::object, nb::bytes, size_t, nb::object, nb::object, bool>(), nb::arg("handshake"), nb::arg("extremes"), nb::arg("level"),
             nb::arg("piggyback").none(), nb::arg("operation").none(), nb::arg("traced") = false)
        .def("begin", &Collective::begin, nb::arg("x").none(), nb::arg("out").none(), nb::arg("residual").none(), nb::arg("number"),
             nb::arg("spins"), nb::arg("sleeps"), "Begin a run, and continue until something must be waited for; return whether it has ended.")
        .def("Test", nb::overload_cast<>(&Collective::advance), "Continue until something must be waited for; return whether there was progress.")
        .def("wait", nb::overload_cast<size_t, size_t>(&Collective::advance), nb::arg("spins"), nb::arg("sleeps"),
             "The same, but first wait: `spins` polls, then sleeps of up to `sleeps` ms.")
        .def_prop_ro("ended", &Collective::ended, "Whether the operation has ended, or the handshake has and no operation follows.")
        .def_prop_ro("done", &Collective::done, "Whether the operation has ended.")
        .def_prop_ro("level", &Collective::level, "The highest level of all ranks; None before the handshake's end, and if their calls differ.")
        .def_prop_ro("times", &Collective::times, "When the last run began, and when its handshake and its operation ended, by time.perf_counter, if it is traced.");
}
