// compcoll.kernels._host.Selection32 and Selection64: selection and sparse wires on NumPy memory of float32 and float64.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "instruction_sets.h"
#include "laplacian.h"
#include "sparse.h"
#include "sparse_passes.h"
#include "sparse_wire.h"
#include "threshold_search.h"
#include "unaligned.h"

namespace nb = nanobind;
using namespace compcoll;

namespace {

using Indices = Array<const uint32_t>;
using IndicesOut = Array<uint32_t>;

// Check that all indices are below n: callers may pass arbitrary ones.
void require_within(const Indices& indices, size_t n) {
    const uint32_t* at = indices.data();
    require(indices.size() == 0 || *std::max_element(at, at + indices.size()) < n, "an index is out of range");
}

// Store zeros.
void zero(uint8_t* to, size_t nbytes) {
    constexpr size_t past_the_caches = 8 << 20;
    static constexpr uint8_t zeros[4096] = {};
    if (nbytes >= past_the_caches) {
        uint8_t* const end = to + nbytes;
        for (; reinterpret_cast<uintptr_t>(to) % 64 != 0; ++to) *to = 0;
        for (; to + sizeof(zeros) <= end; to += sizeof(zeros)) copy_past_caches(to, zeros, sizeof(zeros));
        publish();
        nbytes = static_cast<size_t>(end - to);
    }
    std::memset(to, 0, nbytes);
}

template <class T>
class Selection {
public:
    using Values = Array<const T>;
    using Fitted = std::tuple<double, double, double, double, double>;  // the fields of Fit
    using Search = std::tuple<size_t, size_t, double, double, double, double>;  // compcoll.host.selection.Search
    using ValuesOut = Array<T>;

    // `instruction_set` is an index of instruction_sets().
    explicit Selection(int instruction_set) : pass_(&sparse_of(checked_set(instruction_set)).of<T>()) {}

    std::tuple<double, double, double, double> moments(Values values) const {
        const nb::gil_scoped_release released;
        const Moments m = pass_->moments(values.data(), values.size());
        return {m.sum, m.absolute, m.square, m.largest};
    }

    // Fit a sample of m values, or all values.
    Fitted laplacian(Values values, size_t m, double density, double quantile) const {
        const size_t n = values.size();
        require(m == n || (m % 16 == 0 && m <= n), "a multiple of 16, at most n, is needed");
        const nb::gil_scoped_release released;
        const T* looked_at = values.data();
        if (m < n) {
            thread_local std::vector<T> sampled;
            sampled.resize(m);
            compcoll::sample(values.data(), n, sampled.data(), m);
            looked_at = sampled.data();
        }
        return as_tuple(fit(pass_->moments(looked_at, m), static_cast<double>(m), density, quantile));
    }

    // Fit a distribution to the moments of n values.
    static Fitted fitted(std::tuple<double, double, double, double> moments, size_t n, double density, double quantile) {
        const auto [sum, absolute, square, largest] = moments;
        return as_tuple(fit({sum, absolute, square, largest}, static_cast<double>(n), density, quantile));
    }

    // The threshold in the form that kernels elsewhere take.
    static uint64_t threshold_bits(double threshold) { return static_cast<uint64_t>(compcoll::threshold_bits<T>(threshold)); }

    size_t count(Values values, double threshold) const {
        const nb::gil_scoped_release released;
        return pass_->count(values.data(), values.size(), compcoll::threshold_bits<T>(threshold));
    }

    size_t compact(Values values, double threshold, IndicesOut indices) const {
        require(values.size() <= most_sparse_elements, "at most 2^32 values");
        const nb::gil_scoped_release released;
        return pass_->compact(values.data(), values.size(), compcoll::threshold_bits<T>(threshold), indices.data(), indices.size());
    }

    size_t unambiguous(Values values, Values variances, double alpha, double threshold, IndicesOut indices) const {
        require(values.size() == variances.size(), "as many variances as values are needed");
        require(values.size() <= most_sparse_elements, "at most 2^32 values");
        const nb::gil_scoped_release released;
        return pass_->unambiguous(values.data(), variances.data(), values.size(), static_cast<T>(alpha),
                                  compcoll::threshold_bits<T>(threshold), indices.data(), indices.size());
    }

    // Return a threshold that `low` to `high` of the values exceed; see ThresholdSearch.
    std::optional<double> bisected(Values values, double low, double high, double head, double tail, double first,
                                   double second) const {
        const nb::gil_scoped_release released;
        return ThresholdSearch{low, high, head, tail, first, second, 0, 0}.run(counting(values.data(), values.size()));
    }

    // Write the indices of k to `most` values above the threshold. If more than `most` are above it, search a higher threshold,
    // first where a tail with this `scale` would have `aim` values. If there is none, write the indices of all values above the
    // original one. Return the number of indices written, and the number of values above the original threshold. The first is 0 if
    // fewer than k or more than `room` are above it.
    std::pair<size_t, size_t> choose(Values values, Search search, size_t room, IndicesOut indices) const {
        require(values.size() <= most_sparse_elements, "at most 2^32 values");
        require(indices.size() >= std::min(room, values.size()), "room for the indices is needed");
        const nb::gil_scoped_release released;
        const T* at = values.data();
        const auto [k, most, threshold, tail, scale, aim] = search;
        const size_t above = pass_->compact(at, values.size(), compcoll::threshold_bits<T>(threshold), indices.data(), indices.size());
        if (above < k || above > room) return {0, above};
        if (above <= most) return {above, above};
        thread_local std::vector<T> taken;
        taken.resize(above);
        for (size_t i = 0; i < above; ++i) taken[i] = at[indices.data()[i]];
        return {narrow(taken.data(), above, search, indices.data()), above};
    }

    // The second half of `choose`: `taken` has the values at the indices, all above the threshold. Keep the indices above the
    // higher threshold and return their number.
    size_t narrowed(Values taken, Search search, IndicesOut indices) const {
        require(taken.size() == indices.size() && taken.size() > 0, "as many values as indices are needed");
        return narrow(taken.data(), taken.size(), search, indices.data());
    }

    double kth_largest(Values values, size_t k) const {
        require(k > 0 && k <= values.size(), "k must be in 1 … n");
        const nb::gil_scoped_release released;
        return static_cast<double>(compcoll::kth_largest(values.data(), values.size(), k));
    }

    size_t largest(Values values, size_t k, IndicesOut positions) const {
        require(positions.size() >= values.size(), "room for as many positions as values is needed");
        require(values.size() <= most_sparse_elements, "at most 2^32 values");
        const nb::gil_scoped_release released;
        return compcoll::largest(values.data(), values.size(), k, positions.data());
    }

    void sample(Values values, ValuesOut sampled) const {
        require(sampled.size() % 16 == 0 && sampled.size() <= values.size(), "a multiple of 16, at most n, is needed");
        const nb::gil_scoped_release released;
        compcoll::sample(values.data(), values.size(), sampled.data(), sampled.size());
    }

    // Find the values that have a power code. Codes refer to the exponent of `largest`, or of the largest value if that is larger.
    // Return the number of positions kept, and this exponent, biased.
    std::pair<size_t, int> powers(Values values, double largest, IndicesOut kept) const {
        require(kept.size() >= values.size(), "room for all positions is needed");
        int top = biased_exponent(static_cast<T>(largest));
        for (size_t i = 0; i < values.size(); ++i)
            if (magnitude_bits(values.data()[i]) < infinity_bits<T>) top = std::max(top, biased_exponent(values.data()[i]));
        size_t count = 0;
        for (size_t i = 0; i < values.size(); ++i)
            if (magnitude_bits(values.data()[i]) < infinity_bits<T> && power_code(values.data()[i], top) >= 0)
                kept.data()[count++] = static_cast<uint32_t>(i);
        return {count, top};
    }

    size_t wire_nbytes(uint64_t n, Indices indices, int index_format, int value_format) const {
        const Chosen<T> chosen = checked(n, indices, nullptr, index_format, value_format);
        return sparse_nbytes(chosen, static_cast<IndexFormat>(index_format), static_cast<ValueFormat>(value_format));
    }

    size_t write(uint64_t n, Indices indices, Values values, int index_format, int value_format, double step, int top,
                 Array<uint8_t> wire) const {
        require(indices.size() == values.size(), "as many indices as values are needed");
        const Chosen<T> chosen = checked(n, indices, values.data(), index_format, value_format);
        const auto as_indices = static_cast<IndexFormat>(index_format);
        const auto as_values = static_cast<ValueFormat>(value_format);
        const size_t nbytes = sparse_nbytes(chosen, as_indices, as_values);
        require(wire.size() >= nbytes, "the wire is too short");
        write_sparse(chosen, as_indices, as_values, step, top, wire.data());
        return nbytes;
    }

    // Return the number of elements in a wire.
    size_t read_count(Array<const uint8_t> wire, uint64_t n) const { return header_of(wire, n).count; }

    void read(Array<const uint8_t> wire, uint64_t n, IndicesOut indices, ValuesOut values) const {
        const SparseHeader header = header_of(wire, n);
        require(indices.size() == header.count && values.size() == header.count, "room for the wire's elements is needed");
        const char* wrong = read_sparse(wire.data(), wire.size(), n, header, indices.data(), values.data());
        require(wrong == nullptr, wrong);
    }

    static void clear(ValuesOut out) {
        const nb::gil_scoped_release released;
        zero(reinterpret_cast<uint8_t*>(out.data()), out.size() * sizeof(T));
    }

    void add(Indices indices, Values values, ValuesOut out) const {
        require(indices.size() == values.size(), "as many indices as values are needed");
        require_within(indices, out.size());
        each(indices, values, out, [](T there, T value) { return there + value; });
    }

    // Add two sparse vectors with ascending indices. The sum's indices are ascending, too. Return its length.
    size_t merge(Indices first, Values first_values, Indices second, Values second_values, IndicesOut indices,
                 ValuesOut values) const {
        require(first.size() == first_values.size() && second.size() == second_values.size() &&
                indices.size() == values.size() && indices.size() >= first.size() + second.size(),
                "as many values as indices, and room for all of them, are needed");
        size_t i = 0, j = 0, count = 0;
        while (i < first.size() || j < second.size()) {
            const bool from_first = j == second.size() || (i < first.size() && first.data()[i] <= second.data()[j]);
            const bool from_second = i == first.size() || (j < second.size() && second.data()[j] <= first.data()[i]);
            indices.data()[count] = from_first ? first.data()[i] : second.data()[j];
            values.data()[count++] = from_first && from_second ? first_values.data()[i] + second_values.data()[j]
                                     : from_first             ? first_values.data()[i]
                                                              : second_values.data()[j];
            i += from_first;
            j += from_second;
        }
        return count;
    }

    // out[indices] -= sent, or 0 if the result is not finite.
    void subtract(Indices indices, Values sent, ValuesOut out) const {
        require(indices.size() == sent.size(), "as many indices as values are needed");
        require_within(indices, out.size());
        each(indices, sent, out, [](T there, T value) { return rest_of(there, value); });
    }

private:
    static Fitted as_tuple(const Fit& f) { return {f.threshold, f.mean, f.largest, f.scale, f.second}; }

    auto counting(const T* values, size_t n) const {
        return [this, values, n](double threshold) { return pass_->count(values, n, compcoll::threshold_bits<T>(threshold)); };
    }

    size_t narrow(const T* taken, size_t n, Search search, uint32_t* indices) const {
        const auto [k, most, threshold, tail, scale, aim] = search;
        const auto total = static_cast<double>(n);
        const double guess = threshold + scale * std::log(total / aim);
        const double first = threshold < guess && guess < tail ? guess : (threshold + tail) / 2;
        const auto found = ThresholdSearch{double(k), double(most), threshold, tail, first, 0, threshold, total}.run(counting(taken, n));
        if (!found) return n;
        const auto bits = compcoll::threshold_bits<T>(*found);
        size_t count = 0;
        for (size_t i = 0; i < n; ++i) {
            indices[count] = indices[i];
            count += is_above(taken[i], bits);
        }
        return count;
    }

    // Apply function(element, value) to each element. Elements are far apart, so prefetching keeps many loads in flight.
    template <class Function>
    static void each(const Indices& indices, const Values& values, const ValuesOut& out, Function function) {
        constexpr size_t ahead = 192;
        const uint32_t* at = indices.data();
        for (size_t i = 0; i < indices.size(); ++i) {
            if (i + ahead < indices.size()) __builtin_prefetch(out.data() + at[i + ahead], 1);
            T& there = out.data()[at[i]];
            there = function(there, values.data()[i]);
        }
    }

    static Chosen<T> checked(uint64_t n, const Indices& indices, const T* values, int index_format, int value_format) {
        require(index_format >= 0 && index_format <= 3 && value_format >= 0 && value_format <= 2, "no such format");
        require(n <= most_sparse_elements, "at most 2^32 values");
        const bool packed = index_format == static_cast<int>(IndexFormat::packed);
        require(!packed || (n <= most_packed_elements && value_format == static_cast<int>(ValueFormat::power)),
                "packed wires are for power codes of at most 2^28 values");
        const uint32_t* at = indices.data();
        for (size_t i = 0; i < indices.size(); ++i)
            require(at[i] < n && (i == 0 || at[i] > at[i - 1]), "indices must be ascending and in range");
        return {values, at, indices.size(), n};
    }

    static SparseHeader header_of(const Array<const uint8_t>& wire, uint64_t n) {
        SparseHeader header;
        const char* wrong = read_header<T>(wire.data(), wire.size(), n, header);
        require(wrong == nullptr, wrong);
        return header;
    }

    const SparseFunctions<T>* pass_;
};

template <class T>
void bind(nb::module_& m, const char* name) {
    using S = Selection<T>;
    const auto exact = [](const char* argument) { return nb::arg(argument).noconvert(); };
    nb::class_<S>(m, name)
        .def(nb::init<int>(), nb::arg("instruction_set"))
        .def("moments", &S::moments, exact("values"))
        .def("laplacian", &S::laplacian, exact("values"), nb::arg("m"), nb::arg("density"), nb::arg("quantile"))
        .def_static("fitted", &S::fitted, nb::arg("moments"), nb::arg("n"), nb::arg("density"), nb::arg("quantile"))
        .def_static("threshold_bits", &S::threshold_bits, nb::arg("threshold"))
        .def("count", &S::count, exact("values"), nb::arg("threshold"))
        .def("compact", &S::compact, exact("values"), nb::arg("threshold"), exact("indices"))
        .def("unambiguous", &S::unambiguous, exact("values"), exact("variances"), nb::arg("alpha"), nb::arg("threshold"),
             exact("indices"))
        .def("bisected", &S::bisected, exact("values"), nb::arg("low"), nb::arg("high"), nb::arg("head"), nb::arg("tail"),
             nb::arg("first"), nb::arg("second"))
        .def("choose", &S::choose, exact("values"), nb::arg("search"), nb::arg("room"), exact("indices"))
        .def("narrowed", &S::narrowed, exact("taken"), nb::arg("search"), exact("indices"))
        .def("kth_largest", &S::kth_largest, exact("values"), nb::arg("k"))
        .def("largest", &S::largest, exact("values"), nb::arg("k"), exact("positions"))
        .def("sample", &S::sample, exact("values"), exact("sampled"))
        .def("powers", &S::powers, exact("values"), nb::arg("largest"), exact("kept"))
        .def("wire_nbytes", &S::wire_nbytes, nb::arg("n"), exact("indices"), nb::arg("index_format"), nb::arg("value_format"))
        .def("write", &S::write, nb::arg("n"), exact("indices"), exact("values"), nb::arg("index_format"),
             nb::arg("value_format"), nb::arg("step"), nb::arg("top"), exact("wire"))
        .def("read_count", &S::read_count, exact("wire"), nb::arg("n"))
        .def("read", &S::read, exact("wire"), nb::arg("n"), exact("indices"), exact("values"))
        .def_static("clear", &S::clear, exact("out"))
        .def("add", &S::add, exact("indices"), exact("values"), exact("out"))
        .def("merge", &S::merge, exact("first"), exact("first_values"), exact("second"), exact("second_values"),
             exact("indices"), exact("values"))
        .def("subtract", &S::subtract, exact("indices"), exact("sent"), exact("out"));
}

}  // namespace

void compcoll::bind_sparse(nb::module_& m) {
    bind<float>(m, "Selection32");
    bind<double>(m, "Selection64");
    m.def("random_indices", [](uint64_t n, uint64_t key, IndicesOut indices) {
        require(n <= most_sparse_elements && indices.size() <= n, "at most n of at most 2^32 indices");
        const nb::gil_scoped_release released;
        for (size_t i = 0; i < indices.size(); ++i) indices.data()[i] = static_cast<uint32_t>(permuted(i, n, key));
        std::sort(indices.data(), indices.data() + indices.size());
    }, nb::arg("n"), nb::arg("key"), nb::arg("indices").noconvert(),
       "The first elements of a random permutation of 0 … n - 1, sorted.");
}
