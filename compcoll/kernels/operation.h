// The part of a collective between its handshake and its result that C++ runs.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "wait_policy.h"

namespace compcoll {

// Statistics of an operation's last run: bytes sent (-1: unknown), the uncompressed bytes that they encode, and seconds.
struct Account {
    int64_t wire_nbytes = 0, raw_nbytes = 0;
    double encode_seconds = 0.0, decode_seconds = 0.0, wait_seconds = 0.0;
};

// An operation runs once at a time, each time on new arrays.
class Operation {
public:
    virtual ~Operation() = default;

    // Begin a run as the collective with this sequence number. Unless the operation needs Python, this only stores the arrays.
    // Nothing is written before `advance`, so a run may begin before the handshake has shown that all ranks make the same call.
    virtual void begin(nanobind::handle x, nanobind::handle out, nanobind::handle residual, uint64_t number) = 0;

    // Continue until the wait for a message exceeds the policy. Return whether there was progress.
    virtual bool advance(WaitPolicy&) { return false; }

    virtual bool done() const { return true; }

    // Return whether the operation needs Python between its begin and its end. If not, `advance` also works without the GIL. It must
    // then be called once more with the GIL, to release the arrays.
    virtual bool needs_python() const { return true; }

    // Release the arrays of a run that has begun but was never advanced.
    virtual void cancel() {}

    virtual Account account() const = 0;
};

// A reduction of small arrays that travel with the handshake's messages. The exchange sends from the reduction's memory. In a
// handshake by recursive doubling, `take` adds the received arrays. After the handshake, the reduction is the operation that stores
// the result.
class PiggybackReduction : public Operation {
public:
    // Bytes of one rank's array.
    virtual size_t nbytes() const = 0;

    // Copy this rank's values to the memory.
    virtual void load(nanobind::handle x) = 0;

    // Add the array received in a round. `before`: whether its ranks precede those whose sum this rank has.
    virtual void take(const uint8_t* others, bool before) = 0;
};

void bind_operation(nanobind::module_& m);

}  // namespace compcoll
