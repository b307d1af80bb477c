// Tables of functions, for float and double.
#pragma once

namespace compcoll {

template <template <class> class Functions>
struct PerType {
    Functions<float> f32;
    Functions<double> f64;

    template <class T>
    const Functions<T>& of() const {
        if constexpr (sizeof(T) == 8) return f64;
        else return f32;
    }
};

}  // namespace compcoll
