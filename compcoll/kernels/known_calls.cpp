// compcoll.kernels._host.KnownCalls: see known_calls.h.
#include "known_calls.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>

namespace nb = nanobind;
using namespace compcoll;

namespace {

constexpr size_t most_kept = 16;

// What a numpy.ndarray is, as NumPy's headers have it (PyArrayObject_fields, the same since 1.7): the buffer protocol describes an
// array anew each time, at ten times the cost.
struct Array {
    PyObject_HEAD
    char* data;
    int dimensions;
    Py_ssize_t *shape, *strides;
    PyObject *base, *dtype;
    int flags;

    size_t elements() const {
        size_t n = 1;
        for (int i = 0; i < dimensions; ++i) n *= static_cast<size_t>(shape[i]);
        return n;
    }
};

constexpr int contiguous = 0x1 | 0x100, writeable = 0x400;  // NPY_ARRAY_C_CONTIGUOUS and _ALIGNED, NPY_ARRAY_WRITEABLE

// Whether NumPy says the same of an array.
bool as_numpy_says(nb::handle object, const Array& array) {
    return array.elements() == nb::cast<size_t>(object.attr("size")) && array.dimensions == nb::cast<int>(object.attr("ndim")) &&
           object.attr("dtype").is(array.dtype) &&
           nb::cast<uintptr_t>(object.attr("ctypes").attr("data")) == reinterpret_cast<uintptr_t>(array.data);
}

// An object, if it is just such an array with these flags.
const Array* array(nb::handle object, nb::handle type, int flags) {
    if (!object.type().is(type)) return nullptr;
    const Array* const found = reinterpret_cast<const Array*>(object.ptr());
    return (found->flags & flags) == flags ? found : nullptr;
}

bool apart(const char* a, size_t a_nbytes, const char* b, size_t b_nbytes) { return a + a_nbytes <= b || b + b_nbytes <= a; }

// Whether two arguments mean the same, as far as this can be told without code of Python's.
bool same(nb::handle a, nb::handle b) {
    if (a.is(b)) return true;
    return PyUnicode_CheckExact(a.ptr()) && PyUnicode_CheckExact(b.ptr()) && PyUnicode_Compare(a.ptr(), b.ptr()) == 0;
}

// The same, or equal whole numbers.
bool same_value(nb::handle a, nb::handle b) {
    return same(a, b) ||
           (PyLong_CheckExact(a.ptr()) && PyLong_CheckExact(b.ptr()) && PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ) == 1);
}

bool same_options(const nb::dict& a, const nb::dict& b) {
    if (a.size() != b.size()) return false;
    for (const auto& [name, value] : a) {
        PyObject* other = PyDict_GetItem(b.ptr(), name.ptr());
        if (!other || !same_value(value, other)) return false;
    }
    return true;
}

}  // namespace

void KnownCalls::keep(const Arguments& given, nb::object recipe) {
    const Array* const x = array(given.x, array_, contiguous);
    if (!x || position(given, x->elements(), x->dtype) != calls_.size()) return;
    if (!as_numpy_says(given.x, *x)) return;  // an interpreter or a NumPy with other headers
    nb::dict options;
    options.update(given.options);
    const std::string name = nb::cast<std::string>(given.collective);
    const Result result = name == "reduce_scatter" ? Result::block : name == "allgather" ? Result::stack : Result::like;
    if (calls_.size() == most_kept) calls_.erase(calls_.begin());
    calls_.push_back({x->elements(), nb::cast<size_t>(given.x.attr("nbytes")), result, name != "alltoall", nb::borrow(x->dtype),
                      given.collective, given.param, given.codec, given.algorithm, options, recipe, !given.feedback.is_none()});
}

std::optional<KnownCalls::Found> KnownCalls::find(const Arguments& given) const {
    const Array* const x = array(given.x, array_, contiguous);
    if (!x) return {};
    const size_t at = position(given, x->elements(), x->dtype);
    if (at == calls_.size()) return {};
    const Call& call = calls_[at];
    const bool parts = call.result == Result::block || !call.in_place;
    if (parts && (x->dimensions == 0 || x->shape[0] % static_cast<Py_ssize_t>(ranks_))) return {};
    if (!given.out.is_none()) {
        if (!fits(call, given.x, given.out)) return {};
        return Found{call.recipe, given.out, call.nbytes};
    }
    const nb::object out = made(call, given.x);
    if (!out.is_valid()) {  // no memory: Python tells the other ranks
        PyErr_Clear();
        return {};
    }
    return Found{call.recipe, out, call.nbytes};
}

std::vector<Py_ssize_t> KnownCalls::shape(const Call& call, nb::handle given) const {
    const Array& x = *reinterpret_cast<const Array*>(given.ptr());
    std::vector<Py_ssize_t> found(x.shape, x.shape + x.dimensions);
    if (call.result == Result::block) found[0] /= static_cast<Py_ssize_t>(ranks_);
    if (call.result == Result::stack) found.insert(found.begin(), static_cast<Py_ssize_t>(ranks_));
    return found;
}

nb::object KnownCalls::made(const Call& call, nb::handle x) const {
    const std::vector<Py_ssize_t> extents = shape(call, x);
    const nb::object wanted = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(extents.size())));
    for (size_t i = 0; i < extents.size(); ++i) PyTuple_SetItem(wanted.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromSsize_t(extents[i]));
    return nb::steal(PyObject_CallFunctionObjArgs(empty_.ptr(), wanted.ptr(), call.dtype.ptr(), nullptr));
}

bool KnownCalls::fits(const Call& call, nb::handle x_given, nb::handle out_given) const {
    const Array* const out = array(out_given, array_, contiguous | writeable);
    const Array* const x = reinterpret_cast<const Array*>(x_given.ptr());
    if (!out || out->dtype != x->dtype) return false;
    if (out == x) return call.result == Result::like && call.in_place;
    const std::vector<Py_ssize_t> wanted = shape(call, x_given);
    return std::equal(wanted.begin(), wanted.end(), out->shape, out->shape + out->dimensions) &&
           apart(x->data, call.nbytes, out->data, x->elements() ? call.nbytes / x->elements() * out->elements() : 0);
}

size_t KnownCalls::position(const Arguments& given, size_t elements, nb::handle dtype) const {
    size_t at = 0;
    for (; at < calls_.size(); ++at) {
        const Call& call = calls_[at];
        if (call.elements == elements && call.dtype.is(dtype) && same(call.collective, given.collective) &&
            same_value(call.param, given.param) && same(call.codec, given.codec) && same(call.algorithm, given.algorithm) &&
            call.fed == !given.feedback.is_none() && same_options(call.options, given.options))
            break;
    }
    return at;
}

void compcoll::bind_known_calls(nb::module_& m) {
    nb::class_<KnownCalls>(m, "KnownCalls")
        .def(nb::init<size_t, nb::object, nb::object>(), nb::arg("ranks"), nb::arg("array"), nb::arg("empty"))
        .def("keep", [](KnownCalls& self, nb::object recipe, nb::object collective, nb::object x, nb::object param, nb::object out,
                        nb::object feedback, const nb::tuple& asked) {
            self.keep({collective, x, param, out, feedback, asked}, recipe);
        }, nb::arg("recipe"), nb::arg("collective"), nb::arg("x"), nb::arg("param").none(), nb::arg("out").none(),
             nb::arg("feedback").none(), nb::arg("asked"), "Remember the recipe of a call that was checked.")
        .def("find", [](const KnownCalls& self, nb::object collective, nb::object x, nb::object param, nb::object out,
                        nb::object feedback, const nb::tuple& asked) -> nb::object {
            const auto found = self.find({collective, x, param, out, feedback, asked});
            return found ? nb::object(nb::make_tuple(found->recipe, found->out)) : nb::none();
        }, nb::arg("collective"), nb::arg("x").none(), nb::arg("param").none(), nb::arg("out").none(),
             nb::arg("feedback").none(), nb::arg("asked"),
             "The recipe and the result of a call like one that was kept; None if there is none, or its arrays need a look.");
}
