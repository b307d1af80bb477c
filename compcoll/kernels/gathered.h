#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "buffer.h"
#include "operation.h"

namespace compcoll {

// A reduction of one small array per rank, which travels with a handshake. The memory has one row: each array is added to it on
// arrival. Or it has a row for each rank, in rank order, wrapping around at its end. Arrays are small enough that latency
// dominates.
class Gathered final : public PiggybackReduction {
public:
    // Of the `rows`, this rank's array is the first in memory, and rank 0's is row `first`.
    Gathered(nanobind::handle memory, size_t ranks, size_t rows, size_t first, size_t n, const std::string& dtype,
             const std::string& op);

    size_t nbytes() const override { return nbytes_; }

    // Copy this rank's array to its row.
    void load(nanobind::handle x) override;

    // Reduce all arrays into `out`.
    void begin(nanobind::handle x, nanobind::handle out, nanobind::handle residual, uint64_t number) override;

    Account account() const override;

    // Only for a single row.
    void take(const uint8_t* others, bool before) override;

    // combine(a, b, n, out); `out` may be a or b.
    using Combine = void (*)(const uint8_t*, const uint8_t*, size_t, uint8_t*);

private:
    void require(const Buffer& given) const;

    Buffer memory_;
    size_t ranks_, rows_, first_, n_, nbytes_;
    Combine combine_;
    void (*multiply_)(uint8_t*, size_t, double) = nullptr;
};

void bind_gathered(nanobind::module_& m);

}  // namespace compcoll
