// compcoll._host.Gathered: one small array of each rank, side by side, and their reduction in rank order. Small enough that
// what counts is the way here and back.
#include "gathered.h"

#include <nanobind/stl/string.h>

#include <complex>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>

#include "unaligned.h"

namespace nb = nanobind;
using namespace compcoll;

namespace {

// The memory of a Python object, by the buffer protocol: any C-contiguous one.
class Buffer {
public:
    Buffer(nb::handle owner, int flags) {
        if (PyObject_GetBuffer(owner.ptr(), &view_, flags) != 0) throw nb::python_error();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    void* at() const { return view_.buf; }
    size_t nbytes() const { return static_cast<size_t>(view_.len); }

private:
    Py_buffer view_;
};

struct Sum {
    template <class T>
    static T of(T a, T b) {
        if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
        else return a + b;
    }
};

struct Prod {
    template <class T>
    static T of(T a, T b) {
        if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
        else return a * b;
    }
    template <class T>  // as it is defined, without the search for infinities of C++'s
    static std::complex<T> of(std::complex<T> a, std::complex<T> b) {
        return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
    }
};

// Of a NaN and anything else: the NaN.
struct Max {
    template <class T>
    static T of(T a, T b) { return a >= b || a != a ? a : b; }
};

struct Min {
    template <class T>
    static T of(T a, T b) { return a <= b || a != a ? a : b; }
};

using Reduce = void (*)(const uint8_t* memory, size_t ranks, size_t rank, size_t n, uint8_t* out);

template <class T, class Op>
void reduce(const uint8_t* memory, size_t ranks, size_t rank, size_t n, uint8_t* out) {
    const auto row = [=](size_t other) { return memory + (other + ranks - rank) % ranks * n * sizeof(T); };
    const auto combine = [=](const uint8_t* a, const uint8_t* b) {
        for (size_t i = 0; i < n * sizeof(T); i += sizeof(T)) store(out + i, Op::of(load<T>(a + i), load<T>(b + i)));
    };
    combine(row(0), row(1));
    for (size_t other = 2; other < ranks; ++other) combine(out, row(other));
}

template <class T>
void multiply(uint8_t* out, size_t n, double factor) {
    for (size_t i = 0; i < n * sizeof(T); i += sizeof(T)) store(out + i, load<T>(out + i) * static_cast<T>(factor));
}

// How elements of a type are reduced; null for what is not defined.
struct Type {
    size_t size;
    Reduce sum, prod, max, min;
    void (*multiply)(uint8_t*, size_t, double);
};

template <class T>
constexpr Type whole{sizeof(T), reduce<T, Sum>, reduce<T, Prod>, reduce<T, Max>, reduce<T, Min>, nullptr};
template <class T>
constexpr Type real{sizeof(T), reduce<T, Sum>, reduce<T, Prod>, reduce<T, Max>, reduce<T, Min>, multiply<T>};
template <class T>  // a complex number is multiplied as its two parts
const Type complex{2 * sizeof(T), reduce<std::complex<T>, Sum>, reduce<std::complex<T>, Prod>, nullptr, nullptr,
                   [](uint8_t* out, size_t n, double factor) { multiply<T>(out, 2 * n, factor); }};

const std::map<std::string, Type, std::less<>> types{
    {"int8", whole<int8_t>},           {"int16", whole<int16_t>},          {"int32", whole<int32_t>},
    {"int64", whole<int64_t>},         {"uint8", whole<uint8_t>},          {"uint16", whole<uint16_t>},
    {"uint32", whole<uint32_t>},       {"uint64", whole<uint64_t>},        {"float32", real<float>},
    {"float64", real<double>},         {"complex64", complex<float>},      {"complex128", complex<double>},
};

// The reduction of an operation by name, null if there is none; and whether the result is divided by the number of ranks.
Reduce reduction_of(const std::string& dtype, const std::string& op) {
    const auto found = types.find(dtype);
    if (found == types.end()) return nullptr;
    const Type& type = found->second;
    if (op == "mean") return type.multiply ? type.sum : nullptr;
    return op == "sum" ? type.sum : op == "prod" ? type.prod : op == "max" ? type.max : op == "min" ? type.min : nullptr;
}

class Gathered {
public:
    Gathered(nb::handle memory, size_t ranks, size_t rank, size_t n, const std::string& dtype, const std::string& op)
        : memory_(memory, PyBUF_WRITABLE), ranks_(ranks), rank_(rank), n_(n), reduce_(reduction_of(dtype, op)) {
        if (!reduce_) throw nb::value_error((op + " of " + dtype + " is not defined").c_str());
        const Type& type = types.at(dtype);
        nbytes_ = n * type.size;
        if (op == "mean") multiply_ = type.multiply;
        if (ranks < 2 || rank >= ranks || memory_.nbytes() / ranks < nbytes_)
            throw nb::value_error("at least 2 ranks, this one among them, and memory for an array of each are needed");
    }

    size_t load(nb::handle x) const {
        const Buffer given(x, PyBUF_SIMPLE);
        require(given);
        std::memcpy(memory_.at(), given.at(), nbytes_);
        return nbytes_;
    }

    void store(nb::handle x, nb::handle result) const {
        const Buffer out(result, PyBUF_WRITABLE);
        require(out);
        auto* to = static_cast<uint8_t*>(out.at());
        reduce_(static_cast<const uint8_t*>(memory_.at()), ranks_, rank_, n_, to);
        if (multiply_) multiply_(to, n_, 1.0 / static_cast<double>(ranks_));
    }

private:
    void require(const Buffer& given) const {
        if (given.nbytes() != nbytes_)
            throw nb::value_error(("an array of " + std::to_string(nbytes_) + " bytes is needed, not " +
                                   std::to_string(given.nbytes())).c_str());
    }

    Buffer memory_;
    size_t ranks_, rank_, n_, nbytes_;
    Reduce reduce_;
    void (*multiply_)(uint8_t*, size_t, double) = nullptr;
};

}  // namespace

void compcoll::bind_gathered(nb::module_& m) {
    nb::class_<Gathered>(m, "Gathered")
        .def(nb::init<nb::handle, size_t, size_t, size_t, const std::string&, const std::string&>(), nb::arg("memory"),
             nb::arg("ranks"), nb::arg("rank"), nb::arg("n"), nb::arg("dtype"), nb::arg("op"))
        .def("load", &Gathered::load, "Put this rank's array in its place; tells how many bytes it has.")
        .def("store", &Gathered::store, nb::arg("x").none(), nb::arg("out"), "Reduce all arrays, of which x was loaded.")
        .def_static("reducible", [](const std::string& dtype, const std::string& op) {
            return reduction_of(dtype, op) != nullptr;
        }, "Whether arrays of this type can be reduced by that operation.");
}
