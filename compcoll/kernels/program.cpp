// compcoll.kernels._host.Program: the recorded messages and kernels of an algorithm, which run again on other buffers
// (compcoll/execute/programs.py).
#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "buffer.h"
#include "host_coder.h"
#include "message.h"
#include "operation.h"
#include "wait_policy.h"
#include "python_calls.h"
#include "stopwatch.h"

namespace nb = nanobind;
using namespace compcoll;

namespace {

constexpr size_t arrays = 3;                    // x, out and the residual
enum Which : size_t { x, out, residual };

// A part of an array: the array's index, and the part's offset, in elements.
using Place = std::tuple<size_t, size_t>;

struct Step {
    enum class Kind { start, await, encode, decode } kind;
    std::optional<Message> message;
    std::string name;    // of the message
    size_t nbytes = 0;   // of the message
    size_t started = 0;  // the step that starts the message
    nb::object owner;  // keeps the coder alive
    const HostCoder* coder = nullptr;
    size_t n = 0;
    int threads = 1;
    std::optional<Place> add, kept, result;
    double scale = 1.0, residual_scale = 1.0;
    std::vector<const uint8_t*> wires;
    uint8_t* wire = nullptr;
    bool feed = true;
    RngPosition rng_counter{0, 0};
};

// A step of the last run: its kind, begin and end in seconds, bytes, and name.
using Span = std::tuple<const char*, double, double, size_t, std::string>;

class Program final : public Operation {
public:
    // `traced`: whether to record when each step begins and ends.
    explicit Program(bool traced) : traced_(traced) {}

    // The name and the bytes of the message are for traces.
    void start(const nb::object& message, std::string name, size_t nbytes) {
        starts_[message.ptr()] = steps_.size();
        Step& step = add_message(Step::Kind::start, message);
        step.name = std::move(name);
        step.nbytes = nbytes;
    }

    void await(const nb::object& message) {
        const auto start = starts_.find(message.ptr());
        Step& step = add_message(Step::Kind::await, message);
        step.started = start == starts_.end() ? steps_.size() - 1 : start->second;
    }

    void encode(nb::object coder, size_t n, std::optional<Place> add, double scale, const std::vector<nb::object>& wires,
                std::optional<Place> kept, bool feed, double residual_scale, uint64_t rng_counter, uint64_t position, nb::object wire,
                std::optional<Place> decoded, int threads) {
        Step step = kernel(Step::Kind::encode, coder, n, add, scale, wires, decoded, threads);
        step.kept = checked(kept, n, step.coder->value_size());
        step.feed = feed;
        step.residual_scale = residual_scale;
        step.rng_counter = RngPosition{rng_counter, position};
        step.wire = memory_of(wire, step.coder->wire_nbytes(n), PyBUF_WRITABLE);
        steps_.push_back(std::move(step));
    }

    void decode(nb::object coder, size_t n, std::optional<Place> add, double scale, const std::vector<nb::object>& wires,
                Place result, int threads) {
        steps_.push_back(kernel(Step::Kind::decode, coder, n, add, scale, wires, result, threads));
    }

    // Begin a run as the collective with this sequence number.
    void begin(nb::handle x_array, nb::handle out_array, nb::handle residual_array, uint64_t number) override {
        number &= 0xffffffff;
        if (running_) throw nb::value_error("the run before has not ended");
        given_[x].emplace(x_array, PyBUF_SIMPLE);
        if (!out_array.is_none()) given_[out].emplace(out_array, PyBUF_WRITABLE);  // None on a rank without a result
        if (!residual_array.is_none()) given_[residual].emplace(residual_array, PyBUF_WRITABLE);
        for (size_t which = 0; which < arrays; ++which) {
            if (needed_[which] <= (given_[which] ? given_[which]->nbytes() : 0)) continue;
            release();
            throw nb::value_error("an array is shorter than those of the program");
        }
        number_ = number;
        encode_seconds_ = decode_seconds_ = wait_seconds_ = 0.0;
        at_ = 0;
        if (traced_) times_.assign(steps_.size(), {});
        running_ = true;
        end_if_over();
    }

    bool done() const override { return !running_; }

    // Continue until the wait for a message exceeds the policy. Return whether there was progress.
    bool advance(WaitPolicy& policy) override {
        const size_t before = at_;
        if (running_ && at_ < steps_.size()) {
            std::optional<Released> released;
            if (!needs_python_) released.emplace();
            while (at_ < steps_.size() && (traced_ ? run_traced(policy) : run(steps_[at_], policy))) ++at_;
        }
        if (!without_gil) end_if_over();  // else the next call with the GIL does this
        return at_ != before;
    }

    bool needs_python() const override { return needs_python_; }

    void cancel() override {
        running_ = false;
        release();
    }

    // Set the bytes that every run sends.
    void sends(int64_t wire_nbytes, int64_t raw_nbytes) {
        wire_nbytes_ = wire_nbytes;
        raw_nbytes_ = raw_nbytes;
    }

    Account account() const override { return {wire_nbytes_, raw_nbytes_, encode_seconds_, decode_seconds_, wait_seconds_}; }

    // Return the steps of the last run, if it was traced, and each message that was waited for as "wire", from its start on.
    std::vector<Span> spans() const {
        std::vector<Span> found;
        for (size_t at = 0; at < times_.size(); ++at) {
            const Step& step = steps_[at];
            const auto [begun, ended] = times_[at];
            if (ended == 0.0 || step.kind == Step::Kind::start) continue;
            if (step.kind == Step::Kind::await) {
                const Step& start = steps_[step.started];
                found.emplace_back("wait", begun, ended, start.nbytes, "");
                found.emplace_back("wire", times_[step.started].first, ended, start.nbytes, start.name);
            } else {
                found.emplace_back(step.kind == Step::Kind::encode ? "encode" : "decode", begun, ended, step.n * step.coder->value_size(), "");
            }
        }
        return found;
    }

private:
    Step& add_message(Step::Kind kind, nb::object message) {
        Step step{};
        step.kind = kind;
        step.message.emplace(message);
        needs_python_ = needs_python_ || !step.message->without_python();
        steps_.push_back(std::move(step));
        return steps_.back();
    }

    Step kernel(Step::Kind kind, nb::object coder, size_t n, std::optional<Place> add, double scale,
                const std::vector<nb::object>& wires, std::optional<Place> result, int threads) {
        Step step{};
        step.kind = kind;
        step.owner = coder;
        step.coder = &nb::cast<const HostCoder&>(coder);
        step.n = n;
        step.threads = threads;
        step.scale = scale;
        if (!add && wires.empty()) throw nb::value_error("nothing to sum");
        for (const nb::object& wire : wires) step.wires.push_back(memory_of(wire, step.coder->wire_nbytes(n), PyBUF_SIMPLE));
        step.add = checked(add, n, storage_size(step.coder->storage()));
        step.result = checked(result, n, storage_size(step.coder->storage()));
        return step;
    }

    uint8_t* memory_of(const nb::object& wire, size_t nbytes, int flags) {
        memory_.push_back(std::make_unique<Buffer>(wire, flags));
        if (memory_.back()->nbytes() < nbytes) throw nb::value_error("a wire is too short");
        return memory_.back()->at();
    }

    // Return a place with its offset in bytes instead of elements. Update the size that its array must have.
    std::optional<Place> checked(std::optional<Place> place, size_t n, size_t itemsize) {
        if (!place) return place;
        const auto [which, first] = *place;
        if (which >= arrays) throw nb::value_error("no such array");
        needed_[which] = std::max(needed_[which], (first + n) * itemsize);
        return Place{which, first * itemsize};
    }

    uint8_t* at(const std::optional<Place>& place) const {
        return place ? given_[std::get<0>(*place)]->at() + std::get<1>(*place) : nullptr;
    }

    // Run the next step and record its times. Return whether it has completed.
    bool run_traced(WaitPolicy& policy) {
        auto& [begun, ended] = times_[at_];
        if (begun == 0.0) begun = seconds_now();
        if (!run(steps_[at_], policy)) return false;
        ended = seconds_now();
        return true;
    }

    // Run a step. Return whether it has completed.
    bool run(const Step& step, WaitPolicy& policy) {
        switch (step.kind) {
            case Step::Kind::start: step.message->start(); return true;
            case Step::Kind::await: return wait(*step.message, policy);
            case Step::Kind::encode: {
                const Stopwatch watch(encode_seconds_);
                work(step, [&](const Terms& terms) {
                    const RngPosition rng_counter{number_ << 32 | step.rng_counter.number, step.rng_counter.position};
                    const Residual kept{at(step.kept), step.feed, step.residual_scale};
                    compcoll::encode(step.coder->coder(), step.coder->storage(), step.n, terms, kept, rng_counter, step.wire,
                                     at(step.result), step.threads);
                });
                return true;
            }
            case Step::Kind::decode: {
                const Stopwatch watch(decode_seconds_);
                work(step, [&](const Terms& terms) {
                    compcoll::decode(step.coder->coder(), step.coder->storage(), step.n, terms, at(step.result), step.threads);
                });
                return true;
            }
        }
        return true;
    }

    template <class Kernel>
    void work(const Step& step, Kernel kernel) {
        if (step.n == 0) return;
        const Terms terms{at(step.add), step.scale, step.wires};
        beside_python(step.n * step.coder->value_size(), [&] { kernel(terms); });
    }

    bool wait(const Message& message, WaitPolicy& policy) {
        if (!message.test()) {
            const Stopwatch watch(wait_seconds_);
            if (!message.wait(policy)) return false;
        }
        policy.renew();
        return true;
    }

    void end_if_over() {
        if (!running_ || at_ < steps_.size()) return;
        running_ = false;
        release();
    }

    void release() {
        for (auto& array : given_) array.reset();
    }

    std::vector<Step> steps_;
    const bool traced_;
    std::vector<std::pair<double, double>> times_;  // of each step of a traced run; 0 if it has not begun, or not ended
    std::unordered_map<PyObject*, size_t> starts_;  // the step that starts each message
    std::vector<std::unique_ptr<Buffer>> memory_;
    std::array<size_t, arrays> needed_{};
    std::array<std::optional<Buffer>, arrays> given_;
    uint64_t number_ = 0;
    size_t at_ = 0;
    bool running_ = false, needs_python_ = false;
    int64_t wire_nbytes_ = 0, raw_nbytes_ = 0;
    double encode_seconds_ = 0.0, decode_seconds_ = 0.0, wait_seconds_ = 0.0;
};

}  // namespace

void compcoll::bind_program(nb::module_& m) {
    nb::class_<Program, Operation>(m, "Program")
        .def(nb::init<bool>(), nb::arg("traced") = false)
        .def("start", &Program::start, nb::arg("message"), nb::arg("name") = "", nb::arg("nbytes") = 0)
        .def("wait", &Program::await, nb::arg("message"))
        .def("encode", &Program::encode, nb::arg("coder"), nb::arg("n"), nb::arg("add").none(), nb::arg("add_scale"),
             nb::arg("wires"), nb::arg("residual").none(), nb::arg("feed"), nb::arg("residual_scale"), nb::arg("rng_counter"),
             nb::arg("position"), nb::arg("wire"), nb::arg("decoded").none(), nb::arg("threads"))
        .def("decode", &Program::decode, nb::arg("coder"), nb::arg("n"), nb::arg("add").none(), nb::arg("add_scale"),
             nb::arg("wires"), nb::arg("out"), nb::arg("threads"))
        .def("sends", &Program::sends, nb::arg("wire_nbytes"), nb::arg("raw_nbytes"), "Set the bytes that every run sends.")
        .def_prop_ro("spans", &Program::spans, "Kind, begin, end, bytes and name of each step and message of the last run, if traced; times by time.perf_counter.");
}
