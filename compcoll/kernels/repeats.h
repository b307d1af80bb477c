#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

namespace compcoll {

// Allreduces with arguments like those of one before, which was checked in Python. After a large allreduce little of what that
// reads is in the CPU's caches, and it takes ten times as long as otherwise.
class Repeats {
public:
    // The arguments of `Collectives.allreduce`.
    struct Arguments {
        nanobind::object x, op, out, feedback, codec, algorithm;
        nanobind::dict options;

        Arguments(nanobind::object x, nanobind::object op, nanobind::object out, nanobind::object feedback,
                  const nanobind::tuple& asked)
            : x(x), op(op), out(out), feedback(feedback), codec(asked[0]), algorithm(asked[1]), options(asked[2]) {}
    };

    struct Found {
        nanobind::object recipe, out;
        size_t nbytes;
    };

    Repeats(nanobind::object array, nanobind::object empty_like) : array_(array), empty_like_(empty_like) {}

    // Remember the recipe of a call that was checked.
    void keep(const Arguments& given, nanobind::object recipe);

    // The recipe and the result of a call like one that was kept; none if there is none, or its arrays need a look.
    std::optional<Found> find(const Arguments& given) const;

private:
    struct Call {
        size_t elements, nbytes;
        nanobind::object dtype;
        nanobind::object op, codec, algorithm;
        nanobind::dict options;
        nanobind::object recipe;
    };

    // Where the call of such arguments on so many elements of some type is kept; the number of calls if it is not.
    size_t position(const Arguments& given, size_t elements, nanobind::handle dtype) const;

    nanobind::object array_, empty_like_;
    std::vector<Call> calls_;
};

void bind_repeats(nanobind::module_& m);

}  // namespace compcoll
