// The CUDA program as a library for the CPU: the same device.cu, with a std::thread for each CUDA thread of a thread block and
// std::barrier where threads meet. Thread blocks run one after the other, so that shared memory is static memory.
#include <barrier>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Index {
    unsigned x;
};
inline thread_local Index threadIdx, blockIdx;
inline Index blockDim, gridDim;

namespace shim {

using Barrier = std::barrier<>;

constexpr int most_threads = 256;
std::unique_ptr<Barrier> of_block;
int dropped_line = 0;  // a barrier on that line is left out
bool flushing = false;  // subnormal numbers, read or written, become 0: as CuPy has it

struct Flushing {
#if defined(__SSE2__)
    unsigned before = _mm_getcsr();
    Flushing() {
        if (flushing) _mm_setcsr(before | 0x8040);
    }
    ~Flushing() { _mm_setcsr(before); }
#endif
};

// Of 1, 2, 4 … 32 neighbouring lanes of a warp.
struct LaneBarriers {
    std::vector<std::unique_ptr<Barrier>> of_lanes[6];
    LaneBarriers() {
        for (int level = 0; level < 6; ++level)
            for (int group = 0; group < most_threads >> level; ++group)
                of_lanes[level].push_back(std::make_unique<Barrier>(1 << level));
    }
    void wait(unsigned lanes) {
        const unsigned first = threadIdx.x / 32 * 32 + static_cast<unsigned>(std::countr_zero(lanes));
        const int level = std::countr_zero(static_cast<unsigned>(std::popcount(lanes)));
        of_lanes[level][first >> level]->arrive_and_wait();
    }
};
LaneBarriers lane_barriers;

inline void block_barrier(int line) {
    if (line != dropped_line) of_block->arrive_and_wait();
}
inline void warp_barrier(int line) {
    if (line != dropped_line) lane_barriers.wait(0xffffffffu);
}

uint64_t exchanged[most_threads];

}  // namespace shim

#define __syncthreads() shim::block_barrier(__LINE__)
#define __syncwarp() shim::warp_barrier(__LINE__)

template <class Number>
Number exchanged_with(unsigned lanes, Number number, unsigned thread) {
    std::memcpy(&shim::exchanged[threadIdx.x], &number, sizeof(Number));
    shim::lane_barriers.wait(lanes);
    Number other;
    std::memcpy(&other, &shim::exchanged[thread], sizeof(Number));
    shim::lane_barriers.wait(lanes);
    return other;
}

template <class Number>
Number __shfl_xor_sync(unsigned lanes, Number number, int distance) {
    return exchanged_with(lanes, number, threadIdx.x ^ static_cast<unsigned>(distance));
}
template <class Number>
Number __shfl_sync(unsigned lanes, Number number, int lane, int width) {
    return exchanged_with(lanes, number, threadIdx.x / static_cast<unsigned>(width) * static_cast<unsigned>(width) + static_cast<unsigned>(lane));
}
template <class Number>
Number __shfl_up_sync(unsigned lanes, Number number, unsigned distance, int width) {
    return exchanged_with(lanes, number, threadIdx.x % static_cast<unsigned>(width) < distance ? threadIdx.x : threadIdx.x - distance);
}

inline unsigned atomicOr(unsigned* at, unsigned bits) { return __atomic_fetch_or(at, bits, __ATOMIC_RELAXED); }

#include "device.cu"

using Kernel = void (*)(Parameters);

// Thread blocks from `first` on. `alone`: threads never meet, and run one after the other.
extern "C" void launch(Kernel kernel, int grid, int block, const Parameters* parameters, int alone, int first) {
    blockDim.x = static_cast<unsigned>(block), gridDim.x = static_cast<unsigned>(grid);
    const auto run = [=](int thread, int number) {
        threadIdx.x = static_cast<unsigned>(thread), blockIdx.x = static_cast<unsigned>(number);
        const shim::Flushing flushing;
        kernel(*parameters);
    };
    if (alone) {
        for (int number = first; number < grid; ++number)
            for (int thread = 0; thread < block; ++thread) run(thread, number);
        return;
    }
    shim::of_block = std::make_unique<shim::Barrier>(block);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < block; ++thread)
        threads.emplace_back([=] {
            for (int number = first; number < grid; ++number) {
                run(thread, number);
                shim::of_block->arrive_and_wait();  // the next thread block has the same shared memory
            }
        });
    for (auto& thread : threads) thread.join();
}

extern "C" void drop_barrier(int line) { shim::dropped_line = line; }
extern "C" void flush_subnormals(int yes) { shim::flushing = yes != 0; }
