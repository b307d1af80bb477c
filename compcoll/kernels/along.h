#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

namespace compcoll {

// What travels along with an opening. The exchange sends it from its memory; where openings go by pairs of ranks, it takes in
// what comes.
class Along {
public:
    virtual ~Along() = default;

    // On the way, each time.
    virtual size_t nbytes() const = 0;

    // What came in a round: of ranks before or behind those that this one stands for.
    virtual void take(const uint8_t* others, bool before) = 0;
};

inline void bind_along(nanobind::module_& m) {
    nanobind::class_<Along>(m, "Along")
        .def_prop_ro("nbytes", &Along::nbytes, "On the way, each time.");
}

}  // namespace compcoll
