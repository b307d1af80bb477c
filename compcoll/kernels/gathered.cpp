// compcoll.kernels._host.Gathered: see gathered.h.
#include "gathered.h"

#include <nanobind/stl/string.h>

#include <bit>
#include <complex>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>

#include "buffer.h"
#include "unaligned.h"

namespace nb = nanobind;
using namespace compcoll;

namespace {

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
    template <class T>  // the plain formula; the operator of C++ also treats infinities
    static std::complex<T> of(std::complex<T> a, std::complex<T> b) {
        return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
    }
};

// A NaN and any other value give the NaN.
struct Max {
    template <class T>
    static T of(T a, T b) { return a >= b || a != a ? a : b; }
};

struct Min {
    template <class T>
    static T of(T a, T b) { return a <= b || a != a ? a : b; }
};

using Combine = Gathered::Combine;

template <class T, class Op>
void combine(const uint8_t* a, const uint8_t* b, size_t n, uint8_t* out) {
    for (size_t i = 0; i < n * sizeof(T); i += sizeof(T)) store(out + i, Op::of(load<T>(a + i), load<T>(b + i)));
}

template <class T>
void multiply(uint8_t* out, size_t n, double factor) {
    for (size_t i = 0; i < n * sizeof(T); i += sizeof(T)) store(out + i, load<T>(out + i) * static_cast<T>(factor));
}

// The reductions of an element type; null where undefined.
struct Type {
    size_t size;
    Combine sum, prod, max, min;
    void (*multiply)(uint8_t*, size_t, double);
};

template <class T>
constexpr Type whole{sizeof(T), combine<T, Sum>, combine<T, Prod>, combine<T, Max>, combine<T, Min>, nullptr};
template <class T>
constexpr Type real{sizeof(T), combine<T, Sum>, combine<T, Prod>, combine<T, Max>, combine<T, Min>, multiply<T>};
template <class T>  // the factor is real: scale both parts
const Type complex{2 * sizeof(T), combine<std::complex<T>, Sum>, combine<std::complex<T>, Prod>, nullptr, nullptr,
                   [](uint8_t* out, size_t n, double factor) { multiply<T>(out, 2 * n, factor); }};

const std::map<std::string, Type, std::less<>> types{
    {"int8", whole<int8_t>},           {"int16", whole<int16_t>},          {"int32", whole<int32_t>},
    {"int64", whole<int64_t>},         {"uint8", whole<uint8_t>},          {"uint16", whole<uint16_t>},
    {"uint32", whole<uint32_t>},       {"uint64", whole<uint64_t>},        {"float32", real<float>},
    {"float64", real<double>},         {"complex64", complex<float>},      {"complex128", complex<double>},
};

// The reduction by name, or null if it is undefined. "mean" uses the sum; its result must be divided by the number of ranks.
Combine combination_of(const std::string& dtype, const std::string& op) {
    const auto found = types.find(dtype);
    if (found == types.end()) return nullptr;
    const Type& type = found->second;
    if (op == "mean") return type.multiply ? type.sum : nullptr;
    return op == "sum" ? type.sum : op == "prod" ? type.prod : op == "max" ? type.max : op == "min" ? type.min : nullptr;
}

}  // namespace

Gathered::Gathered(nb::handle memory, size_t ranks, size_t rows, size_t first, size_t n, const std::string& dtype,
                   const std::string& op)
    : memory_(memory, PyBUF_WRITABLE), ranks_(ranks), rows_(rows), first_(first), n_(n), combine_(combination_of(dtype, op)) {
    if (!combine_) throw nb::value_error((op + " of " + dtype + " is not defined").c_str());
    const Type& type = types.at(dtype);
    nbytes_ = n * type.size;
    if (op == "mean") multiply_ = type.multiply;
    if (!(rows == 1 || rows == ranks) || first >= rows || memory_.nbytes() / rows < nbytes_)
        throw nb::value_error("memory for one array or for one of each rank is needed, and a place in it");
}

void Gathered::load(nb::handle x) {
    const Buffer given(x, PyBUF_SIMPLE);
    require(given);
    std::memcpy(memory_.at(), given.at(), nbytes_);
}

void Gathered::begin(nb::handle, nb::handle result, nb::handle, uint64_t) {
    const Buffer out(result, PyBUF_WRITABLE);
    require(out);
    const auto row = [&](size_t rank) { return memory_.at() + (first_ + rank) % rows_ * nbytes_; };
    if (rows_ == 1) {
        std::memcpy(out.at(), row(0), nbytes_);
    } else {
        combine_(row(0), row(1), n_, out.at());
        for (size_t rank = 2; rank < rows_; ++rank) combine_(out.at(), row(rank), n_, out.at());
    }
    if (multiply_) multiply_(out.at(), n_, 1.0 / static_cast<double>(ranks_));
}

Account Gathered::account() const {
    // In one row, each round sends one array; by dissemination, a rank sends the arrays of all ranks but one.
    const auto sent = static_cast<int64_t>(nbytes_ * (rows_ == 1 ? std::bit_width(ranks_ - 1) : ranks_ - 1));
    return {sent, sent};
}

void Gathered::take(const uint8_t* others, bool before) {
    uint8_t* own = memory_.at();  // the order matters only for the max or min of two zeros or NaNs
    before ? combine_(others, own, n_, own) : combine_(own, others, n_, own);
}

void Gathered::require(const Buffer& given) const {
    if (given.nbytes() != nbytes_)
        throw nb::value_error(
            ("an array of " + std::to_string(nbytes_) + " bytes is needed, not " + std::to_string(given.nbytes())).c_str());
}

void compcoll::bind_gathered(nb::module_& m) {
    nb::class_<Gathered, PiggybackReduction>(m, "Gathered")
        .def(nb::init<nb::handle, size_t, size_t, size_t, size_t, const std::string&, const std::string&>(),
             nb::arg("memory"), nb::arg("ranks"), nb::arg("rows"), nb::arg("first"), nb::arg("n"),
             nb::arg("dtype"), nb::arg("op"))
        .def_static("reducible", [](const std::string& dtype, const std::string& op) {
            return combination_of(dtype, op) != nullptr;
        }, "Whether arrays of this type can be reduced by that operation.");
}
