#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "buffer.h"
#include "operation.h"
#include "wait_policy.h"

namespace compcoll {

// The rounds of a handshake (compcoll/execute/handshake.py), on messages of Python objects or through memory.
class Exchange {
public:
    // One round: the receive, the send; the wire of the receive and the memory of the send, unless the messages have their own; the
    // bytes of each message; the bytes of the arrays to send, from their beginning; the offset where the received arrays go; whether
    // these belong to ranks before those whose arrays this rank has.
    using Given = std::tuple<nanobind::object, nanobind::object, nanobind::object, nanobind::object, size_t, size_t, size_t, bool>;

    Exchange(nanobind::handle arrays, const std::vector<Given>& rounds);
    ~Exchange();

    // Begin the rounds. `extremes` is this rank's fingerprint twice, as smallest and largest. `piggyback`, unless None, takes the
    // arrays that arrive.
    void begin(const nanobind::bytes& extremes, nanobind::object piggyback);

    // Continue until the wait for a message exceeds the policy. Return whether all rounds have ended.
    bool advance(WaitPolicy& policy);

    // Return whether some message needs Python.
    bool needs_python() const;

    // Return the highest level of all ranks, which the lowest bits of the largest fingerprint carry. None before the end of the last
    // round, and if the ranks' calls differ.
    std::optional<size_t> level() const;

    // A number that changes with every progress.
    size_t position() const { return 4 * round_ + static_cast<size_t>(stage_); }

    nanobind::bytes extremes() const { return nanobind::bytes(extremes_.data(), extremes_.size()); }

private:
    static constexpr size_t fingerprint_nbytes = 8;
    static constexpr size_t begin_nbytes = 2 * fingerprint_nbytes;
    static constexpr uint8_t levels = 3;  // the bits of a fingerprint that carry the level (compcoll/plan/signature.py)
    static constexpr size_t busy = 1;

    using Extremes = std::array<uint8_t, begin_nbytes>;
    enum class Stage { begins, begun, awaited, leaving };  // of a round
    struct Round;
    class Letter;

    void start(const Round& round) const;
    void end(const Round& round);
    void check_length(const Round& round) const;
    bool same_call(const uint8_t* fingerprint) const;

    Buffer arrays_;
    std::vector<std::unique_ptr<Round>> rounds_;
    Extremes first_{}, extremes_{};
    size_t round_ = 0;
    nanobind::object owner_ = nanobind::none();
    PiggybackReduction* piggyback_ = nullptr;
    Stage stage_ = Stage::begins;
};

void bind_exchange(nanobind::module_& m);

}  // namespace compcoll
