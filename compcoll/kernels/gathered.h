#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "buffer.h"
#include "operation.h"

namespace compcoll {

// One small array of each rank on its way through a handshake, and their reduction. Memory has room for all ranks' arrays, side
// by side in the ranks' order, around its end; or for one, to which what comes is added at once. Small enough that what counts
// is the way here and back.
class Gathered final : public PiggybackReduction {
public:
    // Of so many `rows`, this rank's array is the one at the beginning, and rank 0's the one at `first`.
    Gathered(nanobind::handle memory, size_t ranks, size_t rows, size_t first, size_t n, const std::string& dtype,
             const std::string& op);

    size_t nbytes() const override { return nbytes_; }

    // Put this rank's array in its place.
    void load(nanobind::handle x) override;

    // Reduce all arrays into a result.
    void begin(nanobind::handle x, nanobind::handle out, nanobind::handle residual, uint64_t number) override;

    Account account() const override;

    // For the one row.
    void take(const uint8_t* others, bool before) override;

    // of(a, b, n, out): may work in place.
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
