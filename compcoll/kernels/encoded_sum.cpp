// compcoll.kernels._host.EncodedSum: a small sum of encoded values on its way through an opening, by recursive doubling as
// compcoll/algorithms/recursive_doubling.py has it: the same bits.
#include "encoded_sum.h"

#include <bit>
#include <cstring>
#include <vector>

#include "body.h"
#include "buffer.h"
#include "host_coder.h"
#include "python_calls.h"
#include "stopwatch.h"

namespace nb = nanobind;
using namespace compcoll;

namespace {

class EncodedSum final : public Along {
public:
    // Memory is the opening's, for the wire of n values.
    EncodedSum(nb::handle memory, const HostCoder& coder, size_t n, size_t rank, size_t ranks, double scale, int threads)
        : memory_(memory, PyBUF_WRITABLE), coder_(coder), n_(n), nbytes_(coder.wire_nbytes(n)), rank_(rank), ranks_(ranks),
          scale_(scale), threads_(threads), next_(nbytes_) {
        if (ranks < 2 || !std::has_single_bit(ranks) || rank >= ranks) throw nb::value_error("a power of two of ranks is needed");
        if (memory_.nbytes() < nbytes_) throw nb::value_error("the opening's memory is too short");
    }

    size_t nbytes() const override { return nbytes_; }

    // Encode this rank's values, as the collective of this number. The residual is not touched before the end.
    void load(nb::handle x, nb::handle residual, uint64_t number) override {
        const Buffer values(x, PyBUF_SIMPLE);
        require(values, storage_size(coder_.storage()));
        if (residual.is_none()) {
            losses_.clear();
        } else {
            const Buffer kept(residual, PyBUF_SIMPLE);
            require(kept, coder_.value_size());
            losses_.assign(kept.at(), kept.at() + n_ * coder_.value_size());
        }
        number_ = number << 32;
        share_ = 1;
        encode_seconds_ = decode_seconds_ = 0.0;
        encode(Terms{values.at(), scale_, {}}, true, number_ | rank_, memory_.at());
    }

    void take(const uint8_t* others, bool before) override {
        share_ *= 2;
        pair_ = before ? Pair{others, memory_.at()} : Pair{memory_.at(), others};
        if (share_ == ranks_) return;  // both wires stay until the next opening
        // All ranks that make this sum take the same random numbers.
        const uint64_t draw = number_ | static_cast<uint64_t>(std::bit_width(share_)) << 26 | rank_ / share_;
        encode(terms(), false, draw, next_.data());
        std::memcpy(memory_.at(), next_.data(), nbytes_);
    }

    // The sum, after the last round; and to the residual what was lost.
    void begin(nb::handle, nb::handle result, nb::handle residual, uint64_t, Patience) override {
        const Buffer out(result, PyBUF_WRITABLE);
        require(out, storage_size(coder_.storage()));
        if (share_ != ranks_) throw nb::value_error("not all ranks' values have come");
        const Stopwatch watch(decode_seconds_);
        work([&] { compcoll::decode(coder_.coder(), coder_.storage(), n_, terms(), out.at(), threads_); });
        if (!residual.is_none()) {
            const Buffer kept(residual, PyBUF_WRITABLE);
            require(kept, coder_.value_size());
            std::memcpy(kept.at(), losses_.data(), losses_.size());
        }
    }

    Account account() const override {
        const auto rounds = static_cast<int64_t>(std::bit_width(ranks_ - 1));
        return {rounds * static_cast<int64_t>(nbytes_), rounds * static_cast<int64_t>(n_ * storage_size(coder_.storage())), 0,
                encode_seconds_, decode_seconds_};
    }

private:
    struct Pair {
        const uint8_t *first, *second;
    };

    Terms terms() const { return {nullptr, scale_, {pair_.first, pair_.second}}; }

    void encode(const Terms& terms, bool feed, uint64_t draw, uint8_t* wire) {
        const Stopwatch watch(encode_seconds_);
        const Residual residual{losses_.empty() ? nullptr : losses_.data(), feed, 1.0 / static_cast<double>(share_)};
        work([&] {
            compcoll::encode(coder_.coder(), coder_.storage(), n_, terms, residual, Draw{draw, 0}, wire, nullptr, threads_);
        });
    }

    template <class Kernel>
    void work(Kernel kernel) const {
        if (n_) beside_python(n_ * coder_.value_size(), kernel);
    }

    void require(const Buffer& given, size_t itemsize) const {
        if (given.nbytes() != n_ * itemsize) throw nb::value_error("an array is not as long as the sum");
    }

    Buffer memory_;
    const HostCoder& coder_;
    size_t n_, nbytes_, rank_, ranks_;
    double scale_;
    int threads_;
    std::vector<uint8_t> next_, losses_;
    uint64_t number_ = 0;
    size_t share_ = 0;  // ranks whose values are in this rank's sum
    Pair pair_{};
    double encode_seconds_ = 0.0, decode_seconds_ = 0.0;
};

}  // namespace

void compcoll::bind_encoded_sum(nb::module_& m) {
    nb::class_<EncodedSum, Along>(m, "EncodedSum")
        .def(nb::init<nb::handle, const HostCoder&, size_t, size_t, size_t, double, int>(), nb::keep_alive<1, 3>(),
             nb::arg("memory"), nb::arg("coder"), nb::arg("n"), nb::arg("rank"), nb::arg("ranks"), nb::arg("scale"),
             nb::arg("threads"));
}
