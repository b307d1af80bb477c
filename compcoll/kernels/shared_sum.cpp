// compcoll.kernels._host.SharedSum: an allreduce of uncompressed values through memory that all ranks share.
//
// The buffer is processed in pieces small enough to stay in the caches. For each piece, a rank has three stages:
// it copies in the values that other ranks add, adds all ranks' values for its own share, and copies out the shares of the other ranks.
// Its stages may be at different pieces. Main memory is read once and written once. Each stage has a progress counter,
// which only its own rank writes and which never decreases, so that nothing is reset between two calls.
//
// S. Li, T. Hoefler, M. Snir, "NUMA-Aware Shared-Memory Collective Communication for MPI", HPDC 2013 (its scatter-reduce among
// threads of one memory).
#include "bindings.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <optional>
#include <vector>

#include "buffer.h"
#include "copies.h"
#include "host_coder.h"
#include "operation.h"
#include "wait_policy.h"
#include "python_calls.h"

namespace nb = nanobind;
using namespace compcoll;

namespace {

constexpr size_t line = 64;
constexpr size_t slots_each = 3;              // pieces of a rank that other ranks may still need
constexpr size_t usual_pieces = 16;           // more only if slots are too small for so few
constexpr size_t least_nbytes = 256 * 1024;   // of a piece, if its slot has room: smaller ones cost more waits
constexpr size_t hot_nbytes = 16 * 1024;      // a sum is copied to the slot while it is in the first-level cache

enum Stage { copied, added, taken };

// Progress of one rank. `passed` counts the pieces through each stage since creation. `asleep` has a bit (rank modulo 64) for each
// rank that this rank sleeps for; those ranks change `woken`. Each has two cache lines, as processors fetch lines in pairs.
struct Progress {
    alignas(2 * line) std::array<std::atomic<uint64_t>, 3> passed;
    alignas(2 * line) std::atomic<uint64_t> asleep;
    Word woken;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes share these");

struct Range {
    size_t begin, end;
};

class SharedSum final : public Operation {
public:
    SharedSum(nb::handle memory, size_t rank, size_t ranks, const HostCoder& raw, double scale)
        : memory_(memory, PyBUF_WRITABLE), rank_(rank), ranks_(ranks), storage_(raw.storage()), coder_(raw.coder()), scale_(scale) {
        if (rank >= ranks) throw nb::value_error("no such rank");
        if (coder_.codec != Codec::cast || coder_.config.first != static_cast<int>(storage_))
            throw nb::value_error("a coder that leaves values as they are is needed");
        const size_t head = ranks * sizeof(Progress);
        slot_ = memory_.nbytes() > head ? (memory_.nbytes() - head) / (ranks * slots_each) / line * line : 0;
        if (slot_ == 0 || reinterpret_cast<uintptr_t>(memory_.at()) % alignof(Progress) != 0)
            throw nb::value_error("aligned memory for a piece of each rank's is needed");
    }

    // Begin to add all ranks' x, times the scale, into out. All ranks begin the same sums in the same order.
    void begin(nb::handle x, nb::handle out, nb::handle, uint64_t) override {
        if (!done()) throw nb::value_error("the sum before has not ended");
        x_.emplace(x, PyBUF_SIMPLE);
        out_.emplace(out, PyBUF_WRITABLE);
        if (x_->nbytes() != out_->nbytes()) {
            x_.reset(), out_.reset();
            throw nb::value_error("x and out must be alike");
        }
        nbytes_ = x_->nbytes();
        before_ = progress(rank_).passed[taken].load(std::memory_order_relaxed);
        const size_t wanted = std::max(least_nbytes, (nbytes_ / usual_pieces + line - 1) / line * line);
        piece_ = std::min(wanted, slot_);
        pieces_ = (nbytes_ + piece_ - 1) / piece_;
        passed_ = {};
        end_if_done();
    }

    bool done() const override { return passed_[taken] == pieces_; }

    // Continue until a wait for other ranks ends in vain. Return whether there was progress.
    bool advance(WaitPolicy& policy) override {
        const auto before = passed_;
        if (!done()) {
            const auto step = [&] { return take() || add() || copy(); };
            const Released released;
            const auto wait = [&] { return policy.poll_memory(step) || policy.sleep(step, [&](auto most) { sleep(most); }); };
            while (!done() && (step() || wait())) policy.renew();
        }
        if (!without_gil) end_if_done();  // otherwise in the next `advance`, with the GIL
        return passed_ != before;
    }

    bool needs_python() const override { return false; }

    void cancel() override {
        pieces_ = 0;
        passed_ = {};
        end_if_done();
    }

    Account account() const override { return {static_cast<int64_t>(nbytes_), static_cast<int64_t>(nbytes_)}; }

private:
    Progress& progress(size_t rank) const { return reinterpret_cast<Progress*>(memory_.at())[rank]; }

    uint8_t* slot(size_t rank, size_t piece) const {
        const size_t number = rank * slots_each + (before_ + piece) % slots_each;
        return memory_.at() + ranks_ * sizeof(Progress) + number * slot_;
    }

    size_t length(size_t piece) const { return std::min(piece_, x_->nbytes() - piece * piece_); }

    // The range of bytes in a piece that a rank adds.
    Range share(size_t rank, size_t piece) const {
        const size_t nbytes = length(piece), lines = (nbytes + line - 1) / line;
        return {std::min(lines * rank / ranks_ * line, nbytes), std::min(lines * (rank + 1) / ranks_ * line, nbytes)};
    }

    static uint64_t bit(size_t rank) { return uint64_t{1} << rank % 64; }

    // Return whether all other ranks have passed a stage with all pieces up to `piece - back`. If not, `lacking_` records the first
    // rank that has not.
    bool others_passed(Stage stage, size_t piece, size_t back) {
        if (before_ + piece < back) return true;
        const uint64_t wanted = before_ + piece + 1 - back;
        for (size_t rank = 0; rank < ranks_; ++rank)
            if (rank != rank_ && progress(rank).passed[stage].load() < wanted) {
                lacking_ |= bit(rank);
                return false;
            }
        return true;
    }

    void pass(Stage stage) {
        copies_.store(progress(rank_).passed[stage], before_ + ++passed_[stage]);
        for (size_t rank = 0; rank < ranks_; ++rank) {
            Progress& other = progress(rank);
            if (rank == rank_ || (other.asleep.load() & bit(rank_)) == 0) continue;
            ++other.woken;
            wake(other.woken, Among::processes);
        }
    }

    // Sleep for at most `most` until a rank advances that the next stage depends on.
    void sleep(std::chrono::microseconds most) {
        lacking_ = 0;
        const auto ready = [&] {
            return (passed_[taken] != passed_[added] && others_passed(added, passed_[taken], 0)) ||
                   (passed_[added] != passed_[copied] && others_passed(copied, passed_[added], 0)) ||
                   (passed_[copied] != pieces_ && others_passed(taken, passed_[copied], slots_each));
        };
        if (!ready()) sleep_unless(ready, progress(rank_).woken, progress(rank_).asleep, lacking_, most);
    }

    // Copy the values that other ranks add to a slot. They must have taken the piece that the slot held before.
    bool copy() {
        const size_t piece = passed_[copied];
        if (piece == pieces_ || !others_passed(taken, piece, slots_each)) return false;
        const Range own = share(rank_, piece);
        copy_in(piece, {0, own.begin});
        copy_in(piece, {own.end, length(piece)});
        pass(copied);
        return true;
    }

    void copy_in(size_t piece, Range range) {
        const uint8_t* x = x_->at() + piece * piece_;
        if (scale_ == 1.0) return copies_.copy(slot(rank_, piece) + range.begin, x + range.begin, range.end - range.begin);
        for (size_t begin = range.begin, nbytes; begin < range.end; begin += nbytes) {
            nbytes = std::min(hot_nbytes, range.end - begin);
            alignas(line) uint8_t scaled[hot_nbytes];
            encode(coder_, storage_, nbytes / storage_size(storage_), Terms{x + begin, scale_, {}}, Residual{nullptr, false, 1.0},
                   RngPosition{0, 0}, scaled, nullptr, 1);
            copies_.copy(slot(rank_, piece) + begin, scaled, nbytes);
        }
    }

    // Add own and other values of this rank's share, in rank order, for all ranks. The sum goes to the slot, where this rank's own
    // values would be.
    bool add() {
        const size_t piece = passed_[added];
        if (piece == passed_[copied] || !others_passed(copied, piece, 0)) return false;
        const Range own = share(rank_, piece);
        Terms terms{nullptr, scale_, std::vector<const uint8_t*>(ranks_ - 1)};
        for (size_t begin = own.begin, nbytes; begin < own.end; begin += nbytes) {
            nbytes = std::min(hot_nbytes, own.end - begin);
            terms.add = x_->at() + piece * piece_ + begin;
            for (size_t rank = 0, next = 0; rank < ranks_; ++rank)
                if (rank != rank_) terms.wires[next++] = slot(rank, piece) + begin;
            uint8_t* out = out_->at() + piece * piece_ + begin;
            decode(coder_, storage_, nbytes / storage_size(storage_), terms, out, 1);
            copies_.copy(slot(rank_, piece) + begin, out, nbytes);
        }
        pass(added);
        return true;
    }

    // Copy out the sums of the other ranks' shares.
    bool take() {
        const size_t piece = passed_[taken];
        if (piece == passed_[added] || !others_passed(added, piece, 0)) return false;
        for (size_t rank = 0; rank < ranks_; ++rank) {
            const Range theirs = share(rank, piece);
            if (rank != rank_)
                std::memcpy(out_->at() + piece * piece_ + theirs.begin, slot(rank, piece) + theirs.begin, theirs.end - theirs.begin);
        }
        pass(taken);
        return true;
    }

    void end_if_done() {
        if (!done()) return;
        x_.reset();
        out_.reset();
    }

    Buffer memory_;
    size_t rank_, ranks_;
    Storage storage_;
    Coder coder_;
    double scale_;
    CopiesForAnotherCore<> copies_;
    size_t slot_ = 0, piece_ = 0, nbytes_ = 0;  // bytes of a slot, of a piece, and of the buffer
    std::optional<Buffer> x_, out_;
    uint64_t before_ = 0;
    size_t pieces_ = 0;
    std::array<size_t, 3> passed_{};
    uint64_t lacking_ = 0;
};

}  // namespace

void compcoll::bind_shared_sum(nb::module_& m) {
    nb::class_<SharedSum, Operation>(m, "SharedSum")
        .def(nb::init<nb::handle, size_t, size_t, const HostCoder&, double>(), nb::arg("memory"), nb::arg("rank"),
             nb::arg("ranks"), nb::arg("raw"), nb::arg("scale"));
}
