// compcoll._host.Repeats: see repeats.h.
#include "repeats.h"

#include <algorithm>
#include <cstring>

namespace nb = nanobind;
using namespace compcoll;

namespace {

constexpr size_t most_kept = 16;

bool alike(const Buffer& first, const Buffer& second) {
    const Py_buffer &a = first.view(), &b = second.view();
    return a.len == b.len && a.ndim == b.ndim && std::strcmp(a.format, b.format) == 0 &&
           std::equal(a.shape, a.shape + a.ndim, b.shape);
}

bool apart(const Buffer& a, const Buffer& b) { return a.at() + a.nbytes() <= b.at() || b.at() + b.nbytes() <= a.at(); }

// Whether two arguments mean the same, as far as this can be told without code of Python's.
bool same(nb::handle a, nb::handle b) {
    if (a.is(b)) return true;
    return PyUnicode_CheckExact(a.ptr()) && PyUnicode_CheckExact(b.ptr()) && PyUnicode_Compare(a.ptr(), b.ptr()) == 0;
}

bool same_options(const nb::dict& a, const nb::dict& b) {
    if (a.size() != b.size()) return false;
    for (const auto& [name, value] : a) {
        PyObject* other = PyDict_GetItem(b.ptr(), name.ptr());
        if (!other || !(same(value, other) || (PyLong_CheckExact(value.ptr()) && PyLong_CheckExact(other) &&
                                               PyObject_RichCompareBool(value.ptr(), other, Py_EQ) == 1)))
            return false;
    }
    return true;
}

}  // namespace

void Repeats::keep(const Arguments& given, nb::object recipe) {
    const Buffer x = memory(given.x);
    if (!x || !given.feedback.is_none() || position(given, x.view()) != calls_.size()) return;
    nb::dict options;
    options.update(given.options);
    if (calls_.size() == most_kept) calls_.erase(calls_.begin());
    calls_.push_back({x.view().len, x.view().format, given.op, given.codec, given.algorithm, options, recipe});
}

std::optional<Repeats::Found> Repeats::find(const Arguments& given) const {
    const Buffer x = memory(given.x);
    if (!x || !given.feedback.is_none()) return {};
    const size_t at = position(given, x.view());
    if (at == calls_.size()) return {};
    nb::object out = given.out;
    if (out.is_none()) {
        out = nb::steal(PyObject_CallOneArg(empty_like_.ptr(), given.x.ptr()));
        if (!out.is_valid()) {  // no memory: Python tells the other ranks
            PyErr_Clear();
            return {};
        }
    } else if (!out.is(given.x)) {
        const Buffer y = memory(out, PyBUF_WRITABLE);
        if (!y || !alike(x, y) || !apart(x, y)) return {};
    } else if (x.view().readonly) {
        return {};
    }
    return Found{calls_[at].recipe, out, x.nbytes()};
}

Buffer Repeats::memory(nb::handle array, int flags) const {
    return array.type().is(array_) ? Buffer(array, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags, std::nothrow) : Buffer();
}

size_t Repeats::position(const Arguments& given, const Py_buffer& x) const {
    size_t at = 0;
    for (; at < calls_.size(); ++at) {
        const Call& call = calls_[at];
        if (call.nbytes == x.len && same(call.op, given.op) && same(call.codec, given.codec) &&
            same(call.algorithm, given.algorithm) && call.format == x.format && same_options(call.options, given.options))
            break;
    }
    return at;
}

void compcoll::bind_repeats(nb::module_& m) {
    nb::class_<Repeats>(m, "Repeats")
        .def(nb::init<nb::object, nb::object>(), nb::arg("array"), nb::arg("empty_like"))
        .def("keep", [](Repeats& self, nb::object recipe, nb::object x, nb::object op, nb::object out, nb::object feedback,
                        const nb::tuple& asked) { self.keep({x, op, out, feedback, asked}, recipe); },
             nb::arg("recipe"), nb::arg("x"), nb::arg("op").none(), nb::arg("out").none(), nb::arg("feedback").none(),
             nb::arg("asked"), "Remember the recipe of a call that was checked.")
        .def("find", [](const Repeats& self, nb::object x, nb::object op, nb::object out, nb::object feedback,
                        const nb::tuple& asked) -> nb::object {
            const auto found = self.find({x, op, out, feedback, asked});
            return found ? nb::object(nb::make_tuple(found->recipe, found->out)) : nb::none();
        },
             nb::arg("x").none(), nb::arg("op").none(), nb::arg("out").none(), nb::arg("feedback").none(), nb::arg("asked"),
             "The recipe and the result of a call like one that was kept; None if there is none, or its arrays need a look.");
}
