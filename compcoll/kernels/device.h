// Shared by all CUDA kernels: parameters, access to memory of any alignment, and the sums of terms that each thread encodes or stores.
//
// A thread processes `many` consecutive values, the unit of packed codes and of random numbers: eight, or four for ZFP.
// `count` of them exist; a thread neither reads nor writes beyond them.
#pragma once

#include "cast.h"
#include "floats.h"

#if defined(__CUDACC__)
#define COMPCOLL_UNROLL _Pragma("unroll")
#define COMPCOLL_ROLLED _Pragma("unroll 1")
#else
#define COMPCOLL_UNROLL
#define COMPCOLL_ROLLED
#endif

namespace compcoll {

constexpr int most_wires = 16;  // wires per launch

// The parameters of a launch, as packed by `_PARAMETERS` in gpu/launches.py.
struct Parameters {
    int64_t n, blocks;   // values, and blocks of the codec
    const uint8_t* add;  // may be null
    double scale;        // of `add`
    uint8_t* out;        // the wire, or the decoded sum
    uint8_t* residual;   // may be null; has the computing type
    double residual_scale;
    uint8_t* decoded;  // may be null
    uint64_t seed, rng_counter, position;
    int32_t first, second, variant;
    int32_t feed;
    int32_t add_storage, out_storage;
    int32_t wire_count;
    int32_t team;  // log2 of the number of threads that encode a block; more than 32 threads are a thread block
    const uint8_t* wires[most_wires];
};
static_assert(sizeof(Parameters) == 120 + 8 * most_wires, "launches.py knows another layout");

// Constants of a program for one configuration. A COMPCOLL_STORAGE of 0 means that each launch passes the element types.
#if defined(COMPCOLL_FIRST)
COMPCOLL_HD constexpr int first_of(const Parameters&) { return COMPCOLL_FIRST; }
COMPCOLL_HD constexpr int second_of(const Parameters&) { return COMPCOLL_SECOND; }
COMPCOLL_HD constexpr int variant_of(const Parameters&) { return COMPCOLL_VARIANT; }
#else
#define COMPCOLL_STORAGE 0
COMPCOLL_HD int first_of(const Parameters& p) { return p.first; }
COMPCOLL_HD int second_of(const Parameters& p) { return p.second; }
COMPCOLL_HD int variant_of(const Parameters& p) { return p.variant; }
#endif
COMPCOLL_HD int add_storage_of(const Parameters& p) { return COMPCOLL_STORAGE != 0 ? COMPCOLL_STORAGE : p.add_storage; }
COMPCOLL_HD int out_storage_of(const Parameters& p) { return COMPCOLL_STORAGE != 0 ? COMPCOLL_STORAGE : p.out_storage; }

// The element types, numbered as in tile.h.
constexpr int float16_storage = 11, bfloat16_storage = 8, float32_storage = 24;
template <class T>
constexpr int computed_storage = sizeof(T) == 8 ? 53 : 24;

COMPCOLL_HD int64_t storage_nbytes(int storage) { return storage < float32_storage ? 2 : storage == float32_storage ? 4 : 8; }

__device__ __forceinline__ int64_t first_thread() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int64_t all_threads() { return int64_t(gridDim.x) * blockDim.x; }

// ---- memory of any alignment ------------------------------------------------------------------------------------------------

__device__ __forceinline__ bool is_aligned(const void* at, int nbytes) {
    return (reinterpret_cast<size_t>(at) & static_cast<size_t>(nbytes - 1)) == 0;
}

// Load 1 to 8 bytes, zeros above: in one access if possible, else in the largest aligned ones.
__device__ __forceinline__ uint64_t load_bytes(const uint8_t* from, int count) {
    if (count == 4 && is_aligned(from, 4)) return *reinterpret_cast<const uint32_t*>(from);
    if (count == 8 && is_aligned(from, 8)) return *reinterpret_cast<const uint64_t*>(from);
    if (count == 2 && is_aligned(from, 2)) return *reinterpret_cast<const uint16_t*>(from);
    if (count == 1) return *from;
    uint64_t bits = 0;
    if (count == 8 && is_aligned(from, 4)) {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(from);
        return words[0] | uint64_t(words[1]) << 32;
    } else if (count % 2 == 0 && is_aligned(from, 2)) {
        COMPCOLL_ROLLED for (int i = 0; i < count; i += 2) bits |= uint64_t(*reinterpret_cast<const uint16_t*>(from + i)) << 8 * i;
    } else {
        COMPCOLL_ROLLED for (int i = 0; i < count; ++i) bits |= uint64_t(from[i]) << 8 * i;
    }
    return bits;
}

__device__ __forceinline__ void store_bytes(uint8_t* to, uint64_t bits, int count) {
    if (count == 4 && is_aligned(to, 4)) {
        *reinterpret_cast<uint32_t*>(to) = uint32_t(bits);
    } else if (count == 8 && is_aligned(to, 8)) {
        *reinterpret_cast<uint64_t*>(to) = bits;
    } else if (count == 2 && is_aligned(to, 2)) {
        *reinterpret_cast<uint16_t*>(to) = uint16_t(bits);
    } else if (count == 8 && is_aligned(to, 4)) {
        uint32_t* words = reinterpret_cast<uint32_t*>(to);
        words[0] = uint32_t(bits), words[1] = uint32_t(bits >> 32);
    } else if (count % 2 == 0 && is_aligned(to, 2)) {
        COMPCOLL_ROLLED for (int i = 0; i < count; i += 2) *reinterpret_cast<uint16_t*>(to + i) = uint16_t(bits >> 8 * i);
    } else {
        COMPCOLL_ROLLED for (int i = 0; i < count; ++i) to[i] = uint8_t(bits >> 8 * i);
    }
}

template <class T>
__device__ __forceinline__ T load_value(const uint8_t* from) {
    return bits_as<T>(static_cast<BitsOf<T>>(load_bytes(from, sizeof(T))));
}

template <class T>
__device__ __forceinline__ void store_value(uint8_t* to, T value) {
    store_bytes(to, bits_as<BitsOf<T>>(value), sizeof(T));
}

// 8, 16, 32 … bytes at once, with four bytes per word and 16 bytes per instruction.
template <int words>
__device__ __forceinline__ void load_words(const uint8_t* from, uint32_t (&to)[words]) {
    if constexpr (words == 2) {
        const uint2 part = *reinterpret_cast<const uint2*>(from);
        to[0] = part.x, to[1] = part.y;
    } else {
        COMPCOLL_UNROLL for (int i = 0; i < words; i += 4) {
            const uint4 part = reinterpret_cast<const uint4*>(from)[i / 4];
            to[i] = part.x, to[i + 1] = part.y, to[i + 2] = part.z, to[i + 3] = part.w;
        }
    }
}

template <int words>
__device__ __forceinline__ void store_words(uint8_t* to, const uint32_t (&from)[words]) {
    if constexpr (words == 2) {
        *reinterpret_cast<uint2*>(to) = make_uint2(from[0], from[1]);
    } else {
        COMPCOLL_UNROLL for (int i = 0; i < words; i += 4)
            reinterpret_cast<uint4*>(to)[i / 4] = make_uint4(from[i], from[i + 1], from[i + 2], from[i + 3]);
    }
}

// Elements of 1, 2, 4 or 8 bytes to and from memory that is aligned for load_words.
template <class E, int many>
__device__ __forceinline__ void load_aligned(const uint8_t* from, E (&to)[many]) {
    constexpr int per_word = sizeof(E) < 4 ? 4 / sizeof(E) : 1, bits = 8 * sizeof(E);
    uint32_t word[many * sizeof(E) / 4];
    load_words(from, word);
    COMPCOLL_UNROLL for (int i = 0; i < many; ++i) {
        if constexpr (sizeof(E) == 8) to[i] = static_cast<E>(word[2 * i] | uint64_t(word[2 * i + 1]) << 32);
        else to[i] = static_cast<E>(word[i / per_word] >> i % per_word * bits);
    }
}

template <class E, int many>
__device__ __forceinline__ void store_aligned(uint8_t* to, const E (&from)[many]) {
    constexpr int per_word = sizeof(E) < 4 ? 4 / sizeof(E) : 1, bits = 8 * sizeof(E);
    uint32_t word[many * sizeof(E) / 4] = {};
    COMPCOLL_UNROLL for (int i = 0; i < many; ++i) {
        if constexpr (sizeof(E) == 8) word[2 * i] = uint32_t(from[i]), word[2 * i + 1] = uint32_t(from[i] >> 32);
        else word[i / per_word] |= uint32_t(from[i]) << i % per_word * bits;
    }
    store_words(to, word);
}

// Load `count` of `many` elements as bits, zeros for the rest. Each element is aligned to its size.
template <class E, int many>
__device__ __forceinline__ void load_elements(const uint8_t* from, int count, E (&to)[many]) {
    constexpr int nbytes = many * sizeof(E);
    if (count == many && is_aligned(from, nbytes < 16 ? nbytes : 16)) {
        load_aligned(from, to);
    } else {
        COMPCOLL_UNROLL for (int i = 0; i < many; ++i) to[i] = i < count ? reinterpret_cast<const E*>(from)[i] : E(0);
    }
}

template <class E, int many>
__device__ __forceinline__ void store_elements(uint8_t* to, int count, const E (&from)[many]) {
    constexpr int nbytes = many * sizeof(E);
    if (count == many && is_aligned(to, nbytes < 16 ? nbytes : 16)) {
        store_aligned(to, from);
    } else {
        COMPCOLL_UNROLL for (int i = 0; i < many; ++i)
            if (i < count) reinterpret_cast<E*>(to)[i] = from[i];
    }
}

// ---- values in memory of an element type ------------------------------------------------------------------------------------

template <class Half, class T, int many>
__device__ __forceinline__ void load_halves(const uint8_t* from, int count, T (&x)[many]) {
    uint16_t bits[many];
    load_elements(from, count, bits);
    COMPCOLL_UNROLL for (int i = 0; i < many; ++i) x[i] = widened_to<T>(Half::widened(bits[i]));
}

template <class Half, class T, int many>
__device__ __forceinline__ void store_halves(uint8_t* to, int count, const T (&x)[many]) {
    uint16_t bits[many];
    COMPCOLL_UNROLL for (int i = 0; i < many; ++i) bits[i] = Half::narrowed(to_round_further(x[i]));
    store_elements(to, count, bits);
}

// Load `count` of `many` values from the i-th on, as T; zeros for the rest.
template <class T, int many>
__device__ __forceinline__ void load_values(const uint8_t* array, int storage, int64_t i, int count, T (&x)[many]) {
    if (storage == computed_storage<T>) {
        BitsOf<T> bits[many];
        load_elements(array + i * static_cast<int64_t>(sizeof(T)), count, bits);
        COMPCOLL_UNROLL for (int k = 0; k < many; ++k) x[k] = bits_as<T>(bits[k]);
        return;
    }
    const uint8_t* from = array + i * storage_nbytes(storage);
    if (storage == float16_storage) return load_halves<Float16>(from, count, x);
    if (storage == bfloat16_storage) return load_halves<BFloat16>(from, count, x);
    if constexpr (sizeof(T) == 8) {
        uint32_t bits[many];
        load_elements(from, count, bits);
        COMPCOLL_UNROLL for (int k = 0; k < many; ++k) x[k] = widened_to<T>(bits_as<float>(bits[k]));
    }
}

template <class T, int many>
__device__ __forceinline__ void store_values(uint8_t* array, int storage, int64_t i, int count, const T (&x)[many]) {
    if (storage == computed_storage<T>) {
        BitsOf<T> bits[many];
        COMPCOLL_UNROLL for (int k = 0; k < many; ++k) bits[k] = bits_as<BitsOf<T>>(x[k]);
        return store_elements(array + i * static_cast<int64_t>(sizeof(T)), count, bits);
    }
    uint8_t* to = array + i * storage_nbytes(storage);
    if (storage == float16_storage) return store_halves<Float16>(to, count, x);
    if (storage == bfloat16_storage) return store_halves<BFloat16>(to, count, x);
    if constexpr (sizeof(T) == 8) {
        uint32_t bits[many];
        COMPCOLL_UNROLL for (int k = 0; k < many; ++k) bits[k] = bits_as<uint32_t>(float_of(x[k]));
        store_elements(to, count, bits);
    }
}

// ---- sums of terms ----------------------------------------------------------------------------------------------------------
// A *place* is where the values of a thread are: place.load(array, storage, x) and place.store(array, storage, x).

// `count` values from the i-th on.
struct Values {
    int64_t i;
    int count;

    template <class T, int many>
    __device__ __forceinline__ void load(const uint8_t* array, int storage, T (&x)[many]) const { load_values(array, storage, i, count, x); }
    template <class T, int many>
    __device__ __forceinline__ void store(uint8_t* array, int storage, const T (&x)[many]) const { store_values(array, storage, i, count, x); }
};

// Call work(values) for each `many` values.
template <int many, class Work>
__device__ __forceinline__ void for_values(int64_t n, const Work& work) {
    for (int64_t i = first_thread() * many; i < n; i += all_threads() * many)
        work(Values{i, n - i < many ? static_cast<int>(n - i) : many});
}

// Multiply by the scale of `add`.
template <class T, int many>
__device__ __forceinline__ void multiply(const Parameters& p, T (&x)[many]) {
    const T scale = static_cast<T>(p.scale);
    if (scale == T(1)) return;
    COMPCOLL_UNROLL for (int k = 0; k < many; ++k) x[k] = exact_product(x[k], scale);
}

template <class T, int many>
__device__ __forceinline__ void add(T (&x)[many], const T (&term)[many]) {
    COMPCOLL_UNROLL for (int k = 0; k < many; ++k) x[k] = exact_sum(x[k], term[k]);
}

// A place in one array.
template <class Place>
struct InArray {
    Place place;
    uint8_t* array;
    int storage;

    template <class T, int many>
    __device__ __forceinline__ void load(T (&x)[many]) const { place.load(array, storage, x); }
    template <class T, int many>
    __device__ __forceinline__ void store(const T (&x)[many]) const { place.store(array, storage, x); }
};

template <class T, class Place>
__device__ __forceinline__ InArray<Place> residual_at(const Parameters& p, const Place& place) { return {place, p.residual, computed_storage<T>}; }

template <int many, class T, class At>
__device__ __forceinline__ void add_loaded(const At& at, T (&x)[many]) {
    T term[many];
    at.load(term);
    add(x, term);
}

// x = add · scale + D(wires[0]) + …
template <class Code, class T, int many>
__device__ __forceinline__ void sum_terms(const Parameters& p, const Code& code, const Values& at, T (&x)[many]) {
    COMPCOLL_UNROLL for (int k = 0; k < many; ++k) x[k] = T(0);
    if (p.add != nullptr) {
        at.load(p.add, add_storage_of(p), x);
        multiply(p, x);
    }
    COMPCOLL_ROLLED for (int w = 0; w < p.wire_count; ++w) {
        const bool first = w == 0 && p.add == nullptr;
        T term[many];
        code.decode(p.wires[w], at, term);
        COMPCOLL_UNROLL for (int k = 0; k < many; ++k) x[k] = first ? term[k] : exact_sum(x[k], term[k]);
    }
}

// Compute the values to encode, with zeros beyond `at.count`. `plain`: an array without further terms.
template <bool plain, class Code, class T, int many>
__device__ __forceinline__ void wanted(const Parameters& p, const Code& code, const Values& at, T (&x)[many]) {
    if constexpr (plain) {
        at.load(p.add, add_storage_of(p), x);
    } else {
        sum_terms(p, code, at, x);
        if (p.residual != nullptr && p.feed) add_loaded(residual_at<T>(p, at), x);
        COMPCOLL_UNROLL for (int k = 0; k < many; ++k) x[k] = k < at.count ? x[k] : T(0);
    }
}

// Update the residual, and store the values that other ranks decode.
template <class Residual, class Decoded, class T, int many>
__device__ __forceinline__ void conclude(const Parameters& p, const Residual& residual, const Decoded& decoded, const T (&x)[many],
                                         const T (&got)[many]) {
    if (p.residual != nullptr) {
        const T scale = static_cast<T>(p.residual_scale);
        T kept[many];
        if (!p.feed) residual.load(kept);
        COMPCOLL_UNROLL for (int k = 0; k < many; ++k) {
            const T loss = finite_loss(x[k], got[k], scale);
            kept[k] = p.feed ? loss : exact_sum(kept[k], loss);
        }
        residual.store(kept);
    }
    if (p.decoded != nullptr) decoded.store(got);
}

template <class Place, class T, int many>
__device__ __forceinline__ void conclude(const Parameters& p, const Place& place, const T (&x)[many], const T (&got)[many]) {
    conclude(p, residual_at<T>(p, place), InArray<Place>{place, p.decoded, out_storage_of(p)}, x, got);
}

// out = terms
template <class Code>
__device__ __forceinline__ void decode_values(const Parameters& p, const Code& code, const Values& at) {
    typename Code::Value x[Code::many];
    sum_terms(p, code, at, x);
    at.store(p.out, out_storage_of(p), x);
}

template <class Code>
__device__ __forceinline__ void decode_all(const Parameters& p, const Code& code) {
    for_values<Code::many>(p.n, [&](const Values& at) { decode_values(p, code, at); });
}

}  // namespace compcoll
