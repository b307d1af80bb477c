// Helper threads that share a kernel's pieces, without the caller waiting for idle helpers.
//
// A call offers its pieces and processes them itself, one by one; helpers take some meanwhile. At the end it waits only for
// pieces that a helper has begun. So a helper that does not run, as its core is busy, costs nothing. Helpers belong to the
// process, start on first use and sleep between jobs. A forked child has none, and starts its own.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>

namespace compcoll {

// A reference to a callable, called as work(piece), which must outlive it.
class PieceWork {
public:
    template <class Work>
    explicit PieceWork(const Work& work)
        : work_(std::addressof(work)), call_([](const void* it, size_t piece) { (*static_cast<const Work*>(it))(piece); }) {}

    using Call = void (*)(const void*, size_t);
    const void* work() const { return work_; }
    Call call() const { return call_; }

private:
    const void* work_;
    Call call_;
};

constexpr size_t most_pieces = 0xfff;

// Run work(piece) for the pieces from 0 to count, in this thread and in at most threads - 1 helpers. An exception of a piece is
// rethrown here, once no other piece is running.
void in_pieces(size_t count, int threads, PieceWork work);

// How many of `threads` threads have enough work with `nbytes` bytes.
int team_size(size_t nbytes, int threads);

}  // namespace compcoll
