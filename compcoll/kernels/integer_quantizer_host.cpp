// compcoll.kernels._host.IntegerQuantizer32 and IntegerQuantizer64: values as integers that any allreduce can sum, on NumPy memory.
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <optional>

#include "arrays.h"
#include "bindings.h"
#include "instruction_sets.h"

namespace nb = nanobind;
using namespace compcoll;

namespace {

template <class T>
class IntegerQuantizer {
public:
    using Bits = BitsOf<T>;

    IntegerQuantizer(int instruction_set, size_t block)
        : pass_(&integer_quantizer_of(checked_set(instruction_set)).of<T>()), block_(block) {
        require(block > 0 && block % 8 == 0, "block must be a multiple of 8");
    }

    void survey(const Array<const T>& values, const Array<Bits>& largest) const {
        require_blocks(values.size(), largest.size());
        const nb::gil_scoped_release released;
        pass_->survey(values.data(), values.size(), block_, largest.data());
    }

    void to_levels(const Array<const T>& values, const Array<const Bits>& largest, int32_t levels, int nbytes,
                   const Array<uint8_t>& numbers, const std::optional<Array<T>>& lost) const {
        const size_t n = values.size();
        require_blocks(n, largest.size());
        require_numbers(nbytes, n, numbers.size());
        require(!lost || lost->size() == n, "lost must be as long as the values");
        T* const lost_values = lost ? lost->data() : nullptr;
        const nb::gil_scoped_release released;
        pass_->to_levels(values.data(), n, block_, largest.data(), levels, nbytes, numbers.data(), lost_values);
    }

    void from_levels(const Array<const uint8_t>& numbers, int nbytes, const Array<const Bits>& largest, int32_t levels,
                     const Array<T>& values) const {
        require_blocks(values.size(), largest.size());
        require_numbers(nbytes, values.size(), numbers.size());
        const nb::gil_scoped_release released;
        pass_->from_levels(numbers.data(), nbytes, values.size(), block_, largest.data(), levels, values.data());
    }

    void to_votes(const Array<const T>& values, int width, const Array<uint8_t>& numbers) const {
        require_fields(width, values.size(), numbers.size());
        const nb::gil_scoped_release released;
        pass_->to_votes(values.data(), values.size(), width, numbers.data());
    }

    void from_votes(const Array<const uint8_t>& numbers, int width, uint32_t ranks, const Array<const Bits>& largest,
                    const Array<T>& values) const {
        require_blocks(values.size(), largest.size());
        require_fields(width, values.size(), numbers.size());
        const nb::gil_scoped_release released;
        pass_->from_votes(numbers.data(), width, ranks, values.size(), block_, largest.data(), values.data());
    }

    void from_bits(const nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& rows,
                   const Array<const uint8_t>& marks, const Array<T>& values) const {
        const size_t n = values.size(), ranks = rows.shape(0), stride = rows.shape(1);
        require_blocks(n, marks.size());
        size_t masked = 0;
        for (size_t begin = 0, b = 0; begin < n; begin += block_, ++b)
            if (marks.data()[b] == some_zeros) masked += std::min(block_, n - begin);
        require(ranks <= 127 && stride == (n + 7) / 8 + (masked + 7) / 8, "rows of bits, at most 127, must be as long as marks say");
        const nb::gil_scoped_release released;
        pass_->from_bits(rows.data(), ranks, stride, n, block_, marks.data(), values.data());
    }

private:
    void require_blocks(size_t n, size_t count) const {
        require(count == (n + block_ - 1) / block_, "one largest magnitude a block is needed");
    }
    static void require_numbers(int nbytes, size_t n, size_t given) {
        require(nbytes == 1 || nbytes == 2 || nbytes == 4, "numbers must have 1, 2 or 4 bytes");
        require(given == n * static_cast<size_t>(nbytes), "one number a value is needed");
    }
    static void require_fields(int width, size_t n, size_t given) {
        require(width == 2 || width == 4 || width == 8 || width == 16 || width == 32, "fields must have 2, 4, 8, 16 or 32 bits");
        require(given == (n * static_cast<size_t>(width) + 7) / 8, "one field a value is needed");
    }

    const IntegerQuantizerFunctions<T>* pass_;
    size_t block_;
};

template <class T>
void bind(nb::module_& m, const char* name) {
    using Bound = IntegerQuantizer<T>;
    nb::class_<Bound>(m, name)
        .def(nb::init<int, size_t>(), nb::arg("instruction_set"), nb::arg("block"))
        .def("survey", &Bound::survey, nb::arg("values"), nb::arg("largest"))
        .def("to_levels", &Bound::to_levels, nb::arg("values"), nb::arg("largest"), nb::arg("levels"), nb::arg("nbytes"),
             nb::arg("numbers"), nb::arg("lost").none())
        .def("from_levels", &Bound::from_levels, nb::arg("numbers"), nb::arg("nbytes"), nb::arg("largest"), nb::arg("levels"),
             nb::arg("values"))
        .def("to_votes", &Bound::to_votes, nb::arg("values"), nb::arg("width"), nb::arg("numbers"))
        .def("from_votes", &Bound::from_votes, nb::arg("numbers"), nb::arg("width"), nb::arg("ranks"), nb::arg("largest"),
             nb::arg("values"))
        .def("from_bits", &Bound::from_bits, nb::arg("rows"), nb::arg("marks"), nb::arg("values"));
}

}  // namespace

void compcoll::bind_integer_quantizer(nb::module_& m) {
    bind<float>(m, "IntegerQuantizer32");
    bind<double>(m, "IntegerQuantizer64");
}
