// From kernels to Python and back: calls of messages' own functions, which take no arguments, and work beside other threads.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <optional>

namespace compcoll {

inline nanobind::object call(const nanobind::object& function) {
    PyObject* result = PyObject_CallNoArgs(function.ptr());
    if (!result) throw nanobind::python_error();
    return nanobind::steal(result);
}

inline bool is_true(const nanobind::object& test) { return call(test).ptr() == Py_True; }

// Whether this thread let the GIL go by `Released`: what Python's stable ABI cannot tell.
inline constinit thread_local bool without_gil = false;

// Lets other threads of Python's run meanwhile, unless this thread let them already. To take the GIL back beside one that computes
// takes a switch interval, 5 ms: a call shall do that once.
class Released {
public:
    Released() {
        if (!without_gil) released_.emplace();
        without_gil = true;
    }
    ~Released() {
        if (!released_) return;
        released_.reset();
        without_gil = false;
    }

private:
    std::optional<nanobind::gil_scoped_release> released_;
};

// Has the GIL for a while, wherever `Released` let it go.
class Acquired {
public:
    Acquired() { without_gil = false; }
    ~Acquired() { without_gil = before_; }

private:
    const bool before_ = without_gil;
    const nanobind::gil_scoped_acquire acquired_;
};

// Does some work on so many bytes: without the GIL, unless it takes less time than to release that.
template <class Work>
void beside_python(size_t nbytes, Work work) {
    constexpr size_t worth_the_lock = 4096;
    if (nbytes < worth_the_lock) return work();
    const Released released;
    work();
}

}  // namespace compcoll
