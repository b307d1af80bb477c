// What a collective does between its opening and its result, once it needs Python no more.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "patience.h"

namespace compcoll {

// What the last run of a body did: bytes that left (-1: unknown), those they stand for, those of memory that it used first, and
// seconds.
struct Account {
    int64_t wire_nbytes = 0, raw_nbytes = 0, fresh_nbytes = 0;
    double encode_seconds = 0.0, decode_seconds = 0.0, wait_seconds = 0.0;
};

// One run at a time, on arrays that are given anew each time.
class Body {
public:
    virtual ~Body() = default;

    // Begins to run, as the collective of this number, and waits for others with so much patience each time.
    virtual void begin(nanobind::handle x, nanobind::handle out, nanobind::handle residual, uint64_t number, Patience patience) = 0;

    // What of a run can be done before all ranks are known to make the same call: nothing with feedback. Writes to wires only.
    virtual void run_ahead(nanobind::handle, uint64_t) {}

    // The same, where it has begun already.
    virtual void advance_ahead() {}

    // Goes on until something must be waited for; whether there was any progress.
    virtual bool advance() { return false; }

    virtual bool done() const { return true; }

    // Whether it needs no Python from its beginning to its end, and nothing is written before it is advanced: it may begin before
    // all ranks are known to make the same call, and is withdrawn if they do not.
    virtual bool without_python() const { return false; }
    virtual void withdraw_beginning() {}

    virtual Account account() const = 0;

    nanobind::object then;  // called by who iterates over a run, at its end; or nothing
};

// What travels along with an opening, and is a body when that has ended. The exchange sends it from its memory; where openings go
// by pairs of ranks, it takes in what comes.
class Along : public Body {
public:
    // On the way, each time.
    virtual size_t nbytes() const = 0;

    // Takes this rank's values, as the collective of this number.
    virtual void load(nanobind::handle x, nanobind::handle residual, uint64_t number) = 0;

    // What came in a round: of ranks before or behind those that this one stands for.
    virtual void take(const uint8_t* others, bool before) = 0;
};

void bind_body(nanobind::module_& m);

}  // namespace compcoll
