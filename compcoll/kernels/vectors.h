// The widest vectors of the instruction set that a file is compiled for. They are in an unnamed namespace, because files compiled
// for different instruction sets must not share code.
#pragma once

#include "portable.h"

namespace compcoll {
namespace {

#if defined(__AVX512F__)
constexpr size_t vector_nbytes = 64;
#elif defined(__AVX__)
constexpr size_t vector_nbytes = 32;
#else
constexpr size_t vector_nbytes = 16;
#endif

template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
    typedef float Values __attribute__((vector_size(vector_nbytes)));
    typedef uint32_t Bits __attribute__((vector_size(vector_nbytes)));
    typedef int32_t Signed __attribute__((vector_size(vector_nbytes)));
};
template <>
struct VectorOf<double> {
    typedef double Values __attribute__((vector_size(vector_nbytes)));
    typedef uint64_t Bits __attribute__((vector_size(vector_nbytes)));
    typedef int64_t Signed __attribute__((vector_size(vector_nbytes)));
};

}  // namespace
}  // namespace compcoll
