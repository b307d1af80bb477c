// Records of a tile in shared memory, for codecs whose headers of 2 or 4 bytes misalign codes. A warp accesses global memory
// contiguously, with 16 bytes per lane.
#pragma once

#include "device_rounds.h"

namespace compcoll {

constexpr int tile_warps = 4;  // per thread block, with one tile each

template <class E>
__device__ __forceinline__ void copy_by_warp(const uint8_t* from, uint8_t* to, int nbytes) {
    const int count = nbytes / static_cast<int>(sizeof(E));
    COMPCOLL_ROLLED for (int i = lane_of_warp(); i < count; i += warp_threads)
        reinterpret_cast<E*>(to)[i] = reinterpret_cast<const E*>(from)[i];
}

// Copy `nbytes` bytes between a wire in global memory and shared memory, which is aligned to 16 bytes.
template <int nbytes>
__device__ __forceinline__ void copy_by_warp(const uint8_t* from, uint8_t* to, const uint8_t* wire) {
    if (nbytes % 16 == 0 && is_aligned(wire, 16)) {
        constexpr int words = nbytes / 16, whole = words / warp_threads;
        const int lane = lane_of_warp();
        uint4 word[whole];
        COMPCOLL_UNROLL for (int k = 0; k < whole; ++k) word[k] = reinterpret_cast<const uint4*>(from)[lane + warp_threads * k];
        COMPCOLL_UNROLL for (int k = 0; k < whole; ++k) reinterpret_cast<uint4*>(to)[lane + warp_threads * k] = word[k];
        if (const int rest = lane + warp_threads * whole; rest < words)
            reinterpret_cast<uint4*>(to)[rest] = reinterpret_cast<const uint4*>(from)[rest];
    } else if (nbytes % 4 == 0 && is_aligned(wire, 4)) {
        copy_by_warp<uint32_t>(from, to, nbytes);
    } else if (nbytes % 2 == 0 && is_aligned(wire, 2)) {
        copy_by_warp<uint16_t>(from, to, nbytes);
    } else {
        copy_by_warp<uint8_t>(from, to, nbytes);
    }
}

// A warp's buffer of `nbytes` bytes in shared memory.
template <int nbytes>
struct WarpRecords {
    static constexpr int room = (nbytes + 15) / 16 * 16;

    __device__ __forceinline__ static uint8_t* at() {
        alignas(16) __shared__ uint8_t of_warps[tile_warps][room];
        return of_warps[threadIdx.x / warp_threads];
    }
    // Copy the records from the wire, then call use(), which reads them.
    template <class Use>
    __device__ __forceinline__ static void read(const uint8_t* wire, const Use& use) {
        copy_by_warp<nbytes>(wire, at(), wire);
        __syncwarp();
        use();
        __syncwarp();
    }
    // Call make(), which writes the records, then copy them to the wire.
    template <class Make>
    __device__ __forceinline__ static void write(uint8_t* wire, const Make& make) {
        make();
        __syncwarp();
        copy_by_warp<nbytes>(at(), wire, wire);
        __syncwarp();  // before make() writes again; a shuffle orders no memory
    }
};

}  // namespace compcoll
