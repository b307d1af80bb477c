#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "body.h"
#include "buffer.h"
#include "patience.h"

namespace compcoll {

class Message;

// The rounds of an opening (compcoll/collectives/handshake.py), on messages of Python objects or through memory. So short that what
// counts is the way from one message to the next.
class Exchange {
public:
    // Arriving, sending; the wire of the first and the memory of the second unless they have their own; the bytes of each; of the
    // arrays: how much is sent, from their beginning, and where as much that comes goes; and whether what comes is of ranks before
    // those whose arrays this one has.
    using Given = std::tuple<nanobind::object, nanobind::object, nanobind::object, nanobind::object, size_t, size_t, size_t, bool>;

    Exchange(nanobind::handle arrays, const std::vector<Given>& rounds);
    ~Exchange();

    // From the beginning: whether all rounds ended while each message was waited for so long, and nobody knew of other
    // extremes. If not, something is waited for, or these differ. What comes to the beginning is added to what is there.
    // `meanwhile` is called when the first message was sent.
    bool run(const nanobind::bytes& extremes, nanobind::object along, Patience patience,
             const std::function<void()>& meanwhile = {});

    // The same in two parts: what needs Python, and, where no message does, what does not unless it takes long.
    void prepare(const nanobind::bytes& extremes, nanobind::object along, Patience patience);
    bool without_python() const;
    bool go(const std::function<void()>& meanwhile);

    // The highest level of all ranks, in the lowest bits of the largest fingerprint, when all rounds have ended and all ranks make the
    // same call; else none.
    std::optional<size_t> level() const;

    nanobind::object waiting() const { return waiting_; }

    // What is to be waited for next, when what was waited for has come; None at the end.
    nanobind::object advance();

    nanobind::bytes extremes() const { return nanobind::bytes(extremes_.data(), extremes_.size()); }

private:
    static constexpr size_t fingerprint_nbytes = 8;
    static constexpr size_t begin_nbytes = 2 * fingerprint_nbytes;
    static constexpr uint8_t levels = 7;  // the bits of a fingerprint that tell them

    using Extremes = std::array<uint8_t, begin_nbytes>;
    enum class Stage { begins, begun, awaited, leaving };
    struct Round;
    class Letter;

    const Message* next();
    void begin(const Round& round) const;
    void end(const Round& round);
    void check_length(const Round& round) const;
    bool same_call(const uint8_t* fingerprint) const;

    Buffer arrays_;
    std::vector<std::unique_ptr<Round>> rounds_;
    Extremes first_{}, extremes_{};
    size_t round_ = 0;
    Patience patience_;
    nanobind::object waiting_ = nanobind::none(), along_ = nanobind::none();
    Along* taker_ = nullptr;
    Stage stage_ = Stage::begins;
};

void bind_exchange(nanobind::module_& m);

}  // namespace compcoll
