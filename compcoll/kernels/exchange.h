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
    // Arriving, sending; the wire of the first and the memory of the second unless they have their own; the bytes of each; of the
    // arrays: how much is sent, from their beginning, and where as much that comes goes; and whether what comes is of ranks before
    // those whose arrays this one has.
    using Given = std::tuple<nanobind::object, nanobind::object, nanobind::object, nanobind::object, size_t, size_t, size_t, bool>;

    Exchange(nanobind::handle arrays, const std::vector<Given>& rounds);
    ~Exchange();

    // Begins the rounds with the fingerprint twice, as smallest and largest; `piggyback` or None takes what arrives with them.
    void begin(const nanobind::bytes& extremes, nanobind::object piggyback);

    // Continues until a message must be waited for, and waits with so much patience each time. Returns whether all rounds have ended.
    bool advance(WaitPolicy& policy);

    // Whether messages need Python.
    bool needs_python() const;

    // After the last round the highest level of all ranks, in the lowest bits of the largest fingerprint, if all ranks make the same
    // call; else none.
    std::optional<size_t> level() const;

    // Of progress: it differs where there was some.
    size_t position() const { return 4 * round_ + static_cast<size_t>(stage_); }

    nanobind::bytes extremes() const { return nanobind::bytes(extremes_.data(), extremes_.size()); }

private:
    static constexpr size_t fingerprint_nbytes = 8;
    static constexpr size_t begin_nbytes = 2 * fingerprint_nbytes;
    static constexpr uint8_t levels = 3;  // the bits of a fingerprint that carry them (compcoll/plan/signature.py)
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
