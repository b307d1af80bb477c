// Arrays as a warp accesses them: in rounds of 128 values, with one access each that is contiguous over the warp. Each lane has
// four adjacent values of a round.
#pragma once

#include "device.h"

namespace compcoll {

constexpr int warp_threads = 32, most_warps = 8, round_values = 4 * warp_threads;

__device__ __forceinline__ int lane_of_warp() { return static_cast<int>(threadIdx.x) % warp_threads; }

// A round of elements in memory that is aligned only to one element. Shared memory keeps the accesses contiguous.
template <class E>
__device__ __forceinline__ E (&round_in_shared_memory())[round_values] {
    __shared__ E of_warps[most_warps][round_values];
    return of_warps[threadIdx.x / warp_threads];
}

template <class E>
__device__ __forceinline__ void load_round_of_any(const uint8_t* from, E (&to)[4]) {
    E(&own)[round_values] = round_in_shared_memory<E>();
    const int lane = lane_of_warp();
    COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) own[lane + warp_threads * k] = reinterpret_cast<const E*>(from)[lane + warp_threads * k];
    __syncwarp();
    COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) to[k] = own[4 * lane + k];
    __syncwarp();
}

template <class E>
__device__ __forceinline__ void store_round_of_any(uint8_t* to, const E (&from)[4]) {
    E(&own)[round_values] = round_in_shared_memory<E>();
    const int lane = lane_of_warp();
    COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) own[4 * lane + k] = from[k];
    __syncwarp();
    COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) reinterpret_cast<E*>(to)[lane + warp_threads * k] = own[lane + warp_threads * k];
    __syncwarp();
}

__device__ __forceinline__ bool any_nan(const float (&x)[4]) { return x[0] != x[0] || x[1] != x[1] || x[2] != x[2] || x[3] != x[3]; }

// Four halves, by the GPU's conversions where these give the same bits, that is for all numbers except NaN.
__device__ __forceinline__ void widen_float16(const uint16_t (&bits)[4], float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) asm("cvt.f32.f16 %0, %1;" : "=f"(x[k]) : "h"(bits[k]));
    if (!any_nan(x)) return;
#endif
    COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) x[k] = Float16::widened(bits[k]);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ __forceinline__ uint32_t narrowed_pair(Float16, float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ uint32_t narrowed_pair(BFloat16, float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif

template <class Half>
__device__ __forceinline__ void narrow(const float (&x)[4], uint16_t (&bits)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if (!any_nan(x)) {
        COMPCOLL_UNROLL for (int k = 0; k < 4; k += 2) {
            const uint32_t pair = narrowed_pair(Half(), x[k], x[k + 1]);
            bits[k] = static_cast<uint16_t>(pair), bits[k + 1] = static_cast<uint16_t>(pair >> 16);
        }
        return;
    }
#endif
    COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) bits[k] = Half::narrowed(x[k]);
}

// An array from some value on, which a warp accesses a round at a time.
template <class T>
struct RoundsOf {
    uint8_t* at;
    int storage;
    bool aligned;

    __device__ __forceinline__ RoundsOf(const uint8_t* array, int storage, int64_t begin)
        : at(const_cast<uint8_t*>(array) + begin * storage_nbytes(storage)), storage(storage),
          aligned(is_aligned(at, storage < float32_storage ? 8 : 16)) {}

    template <class E>
    __device__ __forceinline__ void load_bits(int r, E (&bits)[4]) const {
        const uint8_t* from = at + r * round_values * static_cast<int>(sizeof(E));
        if (aligned) load_aligned(from + 4 * lane_of_warp() * static_cast<int>(sizeof(E)), bits);
        else load_round_of_any(from, bits);
    }
    template <class E>
    __device__ __forceinline__ void store_bits(int r, const E (&bits)[4]) const {
        uint8_t* to = at + r * round_values * static_cast<int>(sizeof(E));
        if (aligned) store_aligned(to + 4 * lane_of_warp() * static_cast<int>(sizeof(E)), bits);
        else store_round_of_any(to, bits);
    }

    __device__ __forceinline__ void load(int r, T (&x)[4]) const {
        if (sizeof(T) == 8 || storage == computed_storage<T>) {  // doubles come only from arrays of doubles
            BitsOf<T> bits[4];
            load_bits(r, bits);
            COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) x[k] = bits_as<T>(bits[k]);
        } else if constexpr (sizeof(T) == 4) {
            uint16_t bits[4];
            load_bits(r, bits);
            if (storage == float16_storage) return widen_float16(bits, x);
            COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) x[k] = BFloat16::widened(bits[k]);
        }
    }
    // The values that a load after store(x) returns.
    __device__ __forceinline__ void rounded(const T (&x)[4], T (&got)[4]) const {
        if (sizeof(T) == 8 || storage == computed_storage<T>) {
            COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) got[k] = x[k];
        } else if constexpr (sizeof(T) == 4) {
            uint16_t bits[4];
            narrowed_halves(x, bits);
            if (storage == float16_storage) return widen_float16(bits, got);
            COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) got[k] = BFloat16::widened(bits[k]);
        }
    }
    __device__ __forceinline__ void narrowed_halves(const float (&x)[4], uint16_t (&bits)[4]) const {
        if (storage == float16_storage) narrow<Float16>(x, bits);
        else narrow<BFloat16>(x, bits);
    }
    __device__ __forceinline__ void store(int r, const T (&x)[4]) const {
        if (sizeof(T) == 8 || storage == computed_storage<T>) {
            BitsOf<T> bits[4];
            COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) bits[k] = bits_as<BitsOf<T>>(x[k]);
            store_bits(r, bits);
        } else if constexpr (sizeof(T) == 4) {
            uint16_t bits[4];
            narrowed_halves(x, bits);
            store_bits(r, bits);
        }
    }
};

template <class T>
struct RoundOf {
    const RoundsOf<T>& rounds;
    int r;

    __device__ __forceinline__ void load(T (&x)[4]) const { rounds.load(r, x); }
    __device__ __forceinline__ void store(const T (&x)[4]) const { rounds.store(r, x); }
};

}  // namespace compcoll
