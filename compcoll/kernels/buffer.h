#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <new>

namespace compcoll {

// The memory of a Python object with the buffer protocol; it must be C-contiguous.
class Buffer {
public:
    Buffer() = default;  // no memory
    Buffer(nanobind::handle owner, int flags) : there_(PyObject_GetBuffer(owner.ptr(), &view_, flags) == 0) {
        if (!there_) throw nanobind::python_error();
    }
    // No memory if the object does not provide it.
    Buffer(nanobind::handle owner, int flags, std::nothrow_t) : there_(PyObject_GetBuffer(owner.ptr(), &view_, flags) == 0) {
        if (!there_) PyErr_Clear();
    }
    ~Buffer() {
        if (there_) PyBuffer_Release(&view_);
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    explicit operator bool() const { return there_; }
    const Py_buffer& view() const { return view_; }
    uint8_t* at() const { return static_cast<uint8_t*>(view_.buf); }
    size_t nbytes() const { return static_cast<size_t>(view_.len); }

private:
    Py_buffer view_{};
    bool there_ = false;
};

}  // namespace compcoll
