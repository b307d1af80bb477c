// What a collective does between its handshake and its result, once it needs Python no more.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "wait_policy.h"

namespace compcoll {

// What the last run of an operation did: bytes that left (-1: unknown), those they stand for, and seconds.
struct Account {
    int64_t wire_nbytes = 0, raw_nbytes = 0;
    double encode_seconds = 0.0, decode_seconds = 0.0, wait_seconds = 0.0;
};

// One run at a time, on arrays that are given anew each time.
class Operation {
public:
    virtual ~Operation() = default;

    // Begins a run as the collective of this number. Unless the operation needs Python, this only takes the arrays: nothing is
    // written before `advance`, so that a run may begin before all ranks are known to make the same call.
    virtual void begin(nanobind::handle x, nanobind::handle out, nanobind::handle residual, uint64_t number) = 0;

    // Continues until a message must be waited for, and waits with so much patience each time. Returns whether there was progress.
    virtual bool advance(WaitPolicy&) { return false; }

    virtual bool done() const { return true; }

    // Whether it needs Python between its beginning and its end. If not, `advance` also works without the GIL; it must then be
    // called once more with the GIL, to let go of the arrays.
    virtual bool needs_python() const { return true; }

    // Lets go of the arrays of a run that has begun and was never advanced.
    virtual void cancel() {}

    virtual Account account() const = 0;
};

// A reduction of small arrays that travel with the handshake's messages. The exchange sends from its memory, and where a handshake
// goes by pairs of ranks, `take` adds what arrives. After the handshake it is the operation that stores the result.
class PiggybackReduction : public Operation {
public:
    // Bytes that each message carries.
    virtual size_t nbytes() const = 0;

    // Takes this rank's values.
    virtual void load(nanobind::handle x) = 0;

    // Adds what arrived in a round: from ranks before or behind those that this rank stands for.
    virtual void take(const uint8_t* others, bool before) = 0;
};

void bind_operation(nanobind::module_& m);

}  // namespace compcoll
