// compcoll.kernels._host.LowRank32 and LowRank64: low-rank factors of gradients of one shape, on memory given by its address.
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "bindings.h"
#include "instruction_sets.h"
#include "team.h"

namespace nb = nanobind;
using namespace compcoll;

namespace {

using Address = uintptr_t;

template <class T>
class LowRank {
public:
    LowRank(int instruction_set, size_t rows, size_t columns, size_t rank, size_t stride, bool past_caches)
        : pass_(&low_rank_of(checked_set(instruction_set)).of<T>()), rows_(rows), columns_(columns), rank_(rank), stride_(stride), past_caches_(past_caches) {
        if (rows == 0 || columns == 0 || rank == 0 || stride < columns) throw nb::value_error("there is no such matrix");
    }

    void project(Address gradient, int storage, Address kept, std::pair<Address, Address> sent, Address total, int side,
                 Address given, Address factor, int threads) const {
        const Summed<T> summed{at<const uint8_t>(gradient), checked(storage), at<const T>(kept), at<const T>(sent.first),
                               at<const T>(sent.second),    at<T>(total),     stride_};
        const auto chosen = static_cast<Side>(side);
        const nb::gil_scoped_release released;
        if (chosen != Side::neither) std::fill_n(at<T>(factor), rank_ * (chosen == Side::left ? rows_ : columns_), T(0));
        // Sums along columns are split by columns, so that each thread has its own results.
        for_parts(chosen == Side::right, threads, [&](Part part) {
            std::vector<T> sums(sums_nbytes / sizeof(T) * rank_);
            pass_->project(summed, columns_, rank_, part, past_caches_, chosen, at<const T>(given), at<T>(factor), sums.data());
        });
    }

    void multiply(Address left, Address right, Address product, int storage, int threads) const {
        const Storage stored = checked(storage);
        const nb::gil_scoped_release released;
        for_parts(false, threads, [&](Part part) {
            pass_->multiply(at<const T>(left), at<const T>(right), columns_, rank_, part, past_caches_, at<uint8_t>(product),
                            stored);
        });
    }

private:
    template <class Value>
    static Value* at(Address address) {
        return reinterpret_cast<Value*>(address);
    }

    static Storage checked(int storage) {
        if (!is_storage(storage) || storage_size(static_cast<Storage>(storage)) > sizeof(T))
            throw nb::value_error("gradients must not be wider than their factors");
        return static_cast<Storage>(storage);
    }

    // Call work(part) for parts of the rows, or of the columns, a few per thread.
    template <class Work>
    void for_parts(bool by_columns, int threads, const Work& work) const {
        constexpr size_t parts_each = 4;
        const size_t grain = by_columns ? 64 / sizeof(T) : 4, length = by_columns ? columns_ : rows_;
        const size_t grains = (length + grain - 1) / grain;
        const int team = team_size(rows_ * columns_ * sizeof(T), threads);
        const size_t parts = team == 1 ? 1 : std::min(grains, static_cast<size_t>(team) * parts_each);
        const auto bound = [&](size_t part) { return std::min(length, grains * part / parts * grain); };
        const auto in_part = [&](size_t part) {
            if (by_columns) work(Part{0, rows_, bound(part), bound(part + 1)});
            else work(Part{bound(part), bound(part + 1), 0, columns_});
        };
        in_pieces(parts, team, PieceWork(in_part));
    }

    const LowRankFunctions<T>* pass_;
    size_t rows_, columns_, rank_, stride_;
    bool past_caches_;
};

template <class T>
void bind(nb::module_& m, const char* name) {
    using Bound = LowRank<T>;
    nb::class_<Bound>(m, name)
        .def(nb::init<int, size_t, size_t, size_t, size_t, bool>(), nb::arg("instruction_set"), nb::arg("rows"), nb::arg("columns"),
             nb::arg("rank"), nb::arg("stride"), nb::arg("past_caches"))
        .def("project", &Bound::project, nb::arg("gradient"), nb::arg("storage"), nb::arg("kept"), nb::arg("sent"), nb::arg("total"),
             nb::arg("side"), nb::arg("given"), nb::arg("factor"), nb::arg("threads"))
        .def("multiply", &Bound::multiply, nb::arg("left"), nb::arg("right"), nb::arg("product"), nb::arg("storage"),
             nb::arg("threads"));
}

}  // namespace

void compcoll::bind_low_rank(nb::module_& m) {
    bind<float>(m, "LowRank32");
    bind<double>(m, "LowRank64");
}
