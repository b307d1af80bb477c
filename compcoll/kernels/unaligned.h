// Values at addresses of any alignment. Always inlined: files compiled for different instruction sets share nothing.
#pragma once

#include "portable.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "wires are little endian");

namespace compcoll {

template <class T>
COMPCOLL_HD T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

template <class T>
COMPCOLL_HD void store(void* to, T value) {
    std::memcpy(to, &value, sizeof(T));
}

// *value = decoded, or with `add`: *value = *value + decoded
template <bool add, class T>
COMPCOLL_HD void put(T* value, T decoded) {
    store(value, add ? load<T>(value) + decoded : decoded);
}

// How many of n values come before the next cache line. A long loop that starts there is not slowed down by vector loads
// that straddle two lines.
template <class T>
COMPCOLL_HD size_t before_line(const T* values, size_t n) {
    const size_t count = (0 - reinterpret_cast<uintptr_t>(values)) % 64 / sizeof(T);
    return count < n ? count : n;
}

}  // namespace compcoll
