#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

namespace compcoll {

// The memory of a Python object, by the buffer protocol: any C-contiguous one.
class Buffer {
public:
    Buffer(nanobind::handle owner, int flags) {
        if (PyObject_GetBuffer(owner.ptr(), &view_, flags) != 0) throw nanobind::python_error();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    uint8_t* at() const { return static_cast<uint8_t*>(view_.buf); }
    size_t nbytes() const { return static_cast<size_t>(view_.len); }

private:
    Py_buffer view_;
};

}  // namespace compcoll
