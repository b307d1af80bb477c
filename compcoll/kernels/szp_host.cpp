// compcoll.kernels._host.Szp32 and Szp64: the szp codec on NumPy memory of float32 and float64.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "instruction_sets.h"
#include "szp_passes.h"
#include "unaligned.h"

namespace nb = nanobind;
using namespace compcoll;

namespace {

size_t blocks_of(size_t n) { return (n + szp_block - 1) / szp_block; }
size_t front_nbytes(size_t n) { return static_cast<size_t>(szp_front_nbytes(static_cast<int64_t>(blocks_of(n)))); }

template <class T>
class Szp {
public:
    using Wires = std::vector<Array<const uint8_t>>;

    // `instruction_set` is an index of instruction_sets().
    explicit Szp(int instruction_set) : pass_(&szp_of(checked_set(instruction_set)).of<T>()) {}

    static size_t wire_nbytes(size_t n) {
        const auto rest = static_cast<int>(n % szp_block);
        return front_nbytes(n) + n / szp_block * static_cast<size_t>(szp_most_block_nbytes(szp_block, sizeof(T))) +
               static_cast<size_t>(szp_most_block_nbytes(rest, sizeof(T)));
    }

    size_t encode(size_t n, const std::optional<Array<const T>>& add, double scale, const Wires& wires, double step, double limit,
                  const Array<uint8_t>& wire) const {
        std::vector<SzpWire> read;
        const SzpTerms<T> terms = checked(n, add, scale, wires, step, limit, read);
        require(wire.size() >= wire_nbytes(n), "the wire is too short");
        const nb::gil_scoped_release released;
        store(wire.data(), step);
        return pass_->encode(terms, wire.data());
    }

    void decode(size_t n, const std::optional<Array<const T>>& add, double scale, const Wires& wires, double step, double limit,
                const Array<T>& values) const {
        std::vector<SzpWire> read;
        const SzpTerms<T> terms = checked(n, add, scale, wires, step, limit, read);
        require(values.size() == n, "there must be n values");
        const nb::gil_scoped_release released;
        pass_->decode(terms, values.data());
    }

private:
    static SzpTerms<T> checked(size_t n, const std::optional<Array<const T>>& add, double scale, const Wires& wires, double step,
                               double limit, std::vector<SzpWire>& read) {
        require(!add || add->size() == n, "the array must have n values");
        for (const auto& wire : wires) read.push_back(checked(n, wire, step));
        return {n, add ? add->data() : nullptr, scale, static_cast<T>(limit), step, read.data(), read.size()};
    }

    static SzpWire checked(size_t n, const Array<const uint8_t>& wire, double step) {
        require(wire.size() >= front_nbytes(n), "it is shorter than the table of its blocks");
        require(load<double>(wire.data()) == step, "its step is another");
        const size_t blocks = blocks_of(n);
        const uint8_t *firsts = wire.data() + szp_header_nbytes, *widths = firsts + 4 * blocks;
        size_t nbytes = front_nbytes(n);
        for (size_t b = 0; b < blocks; ++b) {
            require(widths[b] <= szp_widest || widths[b] == szp_raw, "a block has an impossible width");
            const auto m = static_cast<int>(std::min<size_t>(szp_block, n - b * szp_block));
            nbytes += static_cast<size_t>(szp_block_nbytes(widths[b], m, sizeof(T)));
        }
        require(wire.size() == nbytes, "its length is not that of its blocks");
        return {firsts, widths, wire.data() + front_nbytes(n)};
    }

    const SzpFunctions<T>* pass_;
};

template <class T>
void bind(nb::module_& m, const char* name) {
    using Bound = Szp<T>;
    nb::class_<Bound>(m, name)
        .def(nb::init<int>(), nb::arg("instruction_set"))
        .def_static("wire_nbytes", &Bound::wire_nbytes, nb::arg("n"), "The most bytes that n values take.")
        .def("encode", &Bound::encode, nb::arg("n"), nb::arg("add").none(), nb::arg("scale"), nb::arg("wires"), nb::arg("step"),
             nb::arg("limit"), nb::arg("wire"))
        .def("decode", &Bound::decode, nb::arg("n"), nb::arg("add").none(), nb::arg("scale"), nb::arg("wires"), nb::arg("step"),
             nb::arg("limit"), nb::arg("values"));
}

}  // namespace

void compcoll::bind_szp(nb::module_& m) {
    bind<float>(m, "Szp32");
    bind<double>(m, "Szp64");
}
