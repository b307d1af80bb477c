// Calls between kernels and Python: functions of messages without arguments, and work without the GIL.
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

// Whether this thread released the GIL by `Released`: Python's stable ABI does not report it.
inline constinit thread_local bool without_gil = false;

// Releases the GIL in its scope, unless it is released already. Beside a thread that computes, taking the GIL back costs a switch
// interval, 5 ms, so a call should do that once.
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

// Holds the GIL in its scope, also where `Released` has released it.
class Acquired {
public:
    Acquired() { without_gil = false; }
    ~Acquired() { without_gil = before_; }

private:
    const bool before_ = without_gil;
    const nanobind::gil_scoped_acquire acquired_;
};

// Run work on `nbytes` bytes. Release the GIL meanwhile, unless that takes longer than the work.
template <class Work>
void beside_python(size_t nbytes, Work work) {
    constexpr size_t worth_the_lock = 4096;
    if (nbytes < worth_the_lock) return work();
    const Released released;
    work();
}

}  // namespace compcoll
