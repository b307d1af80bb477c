#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

namespace compcoll {

// Collectives with arguments like those of one before, which was checked in Python. After a large collective little of what that
// reads is in the CPU's caches, and it takes ten times as long as otherwise.
class KnownCalls {
public:
    // The arguments of `Communicator.call`; `param` is the operation or the root.
    struct Arguments {
        nanobind::object collective, x, param, out, feedback, codec, algorithm;
        nanobind::dict options;

        Arguments(nanobind::object collective, nanobind::object x, nanobind::object param, nanobind::object out,
                  nanobind::object feedback, const nanobind::tuple& asked)
            : collective(collective), x(x), param(param), out(out), feedback(feedback), codec(asked[0]), algorithm(asked[1]),
              options(asked[2]) {}
    };

    struct Found {
        nanobind::object recipe, out;
        size_t nbytes;
    };

    // Among so many ranks; arrays are of this type, and are made by this function.
    KnownCalls(size_t ranks, nanobind::object array, nanobind::object empty) : ranks_(ranks), array_(array), empty_(empty) {}

    // Remember the recipe of a call that was checked.
    void keep(const Arguments& given, nanobind::object recipe);

    // The recipe and the result of a call like one that was kept; none if there is none, or its arrays need a look.
    std::optional<Found> find(const Arguments& given) const;

private:
    // The result's shape is the input's, a block of it, or one more axis of all ranks' inputs.
    enum class Result { like, block, stack };

    struct Call {
        size_t elements, nbytes;
        Result result;
        bool in_place;
        nanobind::object dtype, collective, param, codec, algorithm;
        nanobind::dict options;
        nanobind::object recipe;
        bool fed;  // whether with feedback, of any kind and state
    };

    // Where the call of such arguments on so many elements of some type is kept; the number of calls if it is not.
    size_t position(const Arguments& given, size_t elements, nanobind::handle dtype) const;

    // A result of a call on an array; none where there is no memory.
    nanobind::object made(const Call& call, nanobind::handle x) const;

    // Whether the result that was given fits.
    bool fits(const Call& call, nanobind::handle x, nanobind::handle out) const;

    std::vector<Py_ssize_t> shape(const Call& call, nanobind::handle x) const;

    size_t ranks_;
    nanobind::object array_, empty_;
    std::vector<Call> calls_;
};

void bind_known_calls(nanobind::module_& m);

}  // namespace compcoll
