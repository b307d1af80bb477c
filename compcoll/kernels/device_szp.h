// The szp codec on a GPU. Half a warp has a block: thread l is lane l of the packing, with one value of each row.
//
// Wires vary in size. A kernel first finds the places of blocks: a *row* of 64-bit numbers for each wire, the offsets from the row
// to the wire and to every 16th block. (From addresses the compiler would not know that they are in global memory.) They use these
// `Parameters`, with `seed`: bits of the step, or 0 for that of the first wire:
//
//   place     wires[0 … variant): wires, add: the first of all; wires[variant …): their lengths, or 0 for a wire just written
//             → out: rows; decoded: the length of a wire just written, or 1 if a wire is corrupted
//   encode    add, residual; first: number of wires, wires[0]: their rows → out: the wire up to its blocks; wires[1]: a slot of
//             the largest size for each block; residual: what rounding `add` loses
//   move      wires[0]: row of the wire, wires[1]: slots → the wire's blocks
//   decode    add; first, wires[0]: as in encode → out
//   largest   add, residual → out: for each warp the largest magnitude; variant: 1 if only finite ones count
//
// with `rng_counter`: bits of the steps per unit of `add`, and `position`: bits of the largest magnitude that integers represent.
#pragma once

#include "device_sparse.h"
#include "device_warps.h"
#include "szp.h"

namespace compcoll {

constexpr int szp_threads = 64;  // of a thread block that sums blocks
constexpr int szp_group = 16;    // blocks from one place of a row to the next
static_assert(szp_lanes == warp_threads / 2 && szp_group == szp_lanes, "half a warp has a block, and a lane for each of a group");

__device__ __forceinline__ int64_t szp_groups(const Parameters& p) { return (p.blocks + szp_group - 1) / szp_group; }

__device__ __forceinline__ int64_t row_nbytes(const Parameters& p) { return 8 * (1 + szp_groups(p)); }

__device__ __forceinline__ double szp_step(const Parameters& p, const uint8_t* first_wire) {
    return p.seed != 0 ? bits_as<double>(p.seed) : load_value<double>(first_wire);
}

// The upper word of (high, low) << shift % 32.
__device__ __forceinline__ uint32_t shifted_left(uint32_t low, uint32_t high, int shift) {
#if defined(__CUDA_ARCH__)
    return __funnelshift_l(low, high, static_cast<uint32_t>(shift));
#else
    return static_cast<uint32_t>((uint64_t(high) << 32 | low) << (shift & 31) >> 32);
#endif
}

// combine(…) of the numbers of all lanes of a block.
template <class Number, class Combine>
__device__ __forceinline__ Number over_lanes(Number number, Combine combine) {
    Number numbers[1] = {number};
    reduce_lanes<szp_lanes>(numbers, combine);
    return numbers[0];
}

struct AnyBit {
    __device__ __forceinline__ uint32_t operator()(uint32_t a, uint32_t b) const { return a | b; }
};

// The block of half a warp. Halves without one repeat the last block, since all threads of a warp exchange numbers, and store nothing.
template <class T>
struct SzpBlock {
    int64_t b;
    int m, lane;
    bool exists;

    __device__ __forceinline__ explicit SzpBlock(const Parameters& p) : b(first_thread() / szp_lanes), lane(lane_of_warp() % szp_lanes) {
        exists = b < p.blocks;
        if (!exists) b = p.blocks - 1;
        m = p.n - b * szp_block < szp_block ? static_cast<int>(p.n - b * szp_block) : szp_block;
    }

    // The index of this lane's value in a row; rows that are cut short repeat the last value.
    __device__ __forceinline__ int64_t index(int row) const {
        const int i = szp_lanes * row + lane;
        return b * szp_block + (i < m ? i : m - 1);
    }
    __device__ __forceinline__ bool has(int row) const { return exists && szp_lanes * row + lane < m; }

    // Call use(row, index) for each row.
    template <class Use>
    __device__ __forceinline__ void for_rows(const Use& use) const {
        if (m == szp_block) {
            COMPCOLL_UNROLL for (int r = 0; r < szp_rows; ++r) use(r, b * szp_block + lane + szp_lanes * r);
        } else {
            COMPCOLL_UNROLL for (int r = 0; r < szp_rows; ++r) use(r, index(r));
        }
    }

    __device__ __forceinline__ uint8_t* slot(const Parameters& p) const {
        return const_cast<uint8_t*>(p.wires[1]) + b * szp_most_block_nbytes(szp_block, sizeof(T));
    }
};

// A wire by its row.
template <class T>
struct SzpPlaces {
    const uint8_t *row, *wire, *widths;

    __device__ __forceinline__ SzpPlaces(const Parameters& p, int w)
        : row(p.wires[0] + w * row_nbytes(p)), wire(row + number(0)), widths(wire + szp_header_nbytes + 4 * p.blocks) {}

    __device__ __forceinline__ int64_t number(int64_t i) const { return reinterpret_cast<const int64_t*>(row)[i]; }

    __device__ __forceinline__ int width(int64_t b) const { return widths[b]; }
    __device__ __forceinline__ uint32_t first(int64_t b) const {
        return static_cast<uint32_t>(load_bytes(wire + szp_header_nbytes + 4 * b, 4));
    }

    // Where a block is; null if the wire is corrupted. All threads of a warp call it.
    __device__ __forceinline__ const uint8_t* block(const SzpBlock<T>& at) const {
        const int64_t group = at.b / szp_group;
        const bool is_before = at.lane < at.b % szp_group;
        const int nbytes = is_before ? szp_block_nbytes(widths[group * szp_group + at.lane], szp_block, sizeof(T)) : 0;
        const int before = over_lanes(nbytes, Sum());
        const int64_t place = number(1 + group);
        return place == 0 ? nullptr : row + place + before;
    }
};

// Run by a thread block for each wire, whose threads each take an equal number of adjacent groups.
template <class T>
__device__ __forceinline__ void place_blocks(const Parameters& p) {
    const int w = static_cast<int>(blockIdx.x);
    const uint8_t *wire = p.wires[w], *widths = wire + szp_header_nbytes + 4 * p.blocks;
    const auto nbytes = reinterpret_cast<size_t>(p.wires[p.variant + w]);
    const int64_t groups = szp_groups(p), share = (groups + tile_threads - 1) / tile_threads;
    const int64_t begin = share * static_cast<int>(threadIdx.x), end = begin + share < groups ? begin + share : groups;
    int64_t* row = reinterpret_cast<int64_t*>(p.out + w * row_nbytes(p));
    int64_t own = 0, all;
    bool is_valid = true;
    for (int64_t g = begin; g < end; ++g) {
        int64_t size = 0;
        for (int64_t b = g * szp_group; b < (g + 1) * szp_group && b < p.blocks; ++b) {
            const int m = p.n - b * szp_block < szp_block ? static_cast<int>(p.n - b * szp_block) : szp_block;
            is_valid = is_valid && (widths[b] <= szp_widest || widths[b] == szp_raw);
            size += szp_block_nbytes(widths[b], m, sizeof(T));
        }
        row[1 + g] = size;
        own += size;
    }
    int64_t before = before_thread(is_valid ? own : int64_t(1) << 52, all);
    all += szp_front_nbytes(p.blocks);
    const bool is_new = nbytes == 0;
    is_valid = is_new || (all == static_cast<int64_t>(nbytes) && load_value<double>(wire) == szp_step(p, p.add));
    const auto to_wire = static_cast<int64_t>(reinterpret_cast<size_t>(wire) - reinterpret_cast<size_t>(row));
    before += to_wire + szp_front_nbytes(p.blocks);
    for (int64_t g = begin; g < end; ++g) {
        const int64_t size = row[1 + g];
        row[1 + g] = is_valid ? before : 0;
        before += size;
    }
    if (threadIdx.x != 0) return;
    row[0] = to_wire;
    if (is_new) *reinterpret_cast<int64_t*>(p.decoded) = all;
    else if (!is_valid) *reinterpret_cast<int64_t*>(p.decoded) = 1;
}

// ---- elements of arrays -----------------------------------------------------------------------------------------------------

template <class T>
struct SzpElements {
    using Stored = T;
    __device__ __forceinline__ static T widened(T stored) { return stored; }
    __device__ __forceinline__ static T narrowed(T value) { return value; }
};

template <class Half>
struct SzpHalves : Half {
    using Stored = uint16_t;
};

template <class T, class Use>
__device__ __forceinline__ void with_elements(int storage, const Use& use) {
    if constexpr (sizeof(T) == 4) {
        if (storage == float16_storage) return use(SzpHalves<Float16>());
        if (storage == bfloat16_storage) return use(SzpHalves<BFloat16>());
    }
    use(SzpElements<T>());
}

__device__ __forceinline__ double as_double(float value) { return double_of(value); }
__device__ __forceinline__ double as_double(double value) { return value; }

// ---- codes ------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void pack_rows(const uint32_t (&numbers)[szp_rows], int width, uint32_t* to) {
    const auto mask = static_cast<uint32_t>((uint64_t(1) << width) - 1);
    uint32_t word = 0;
    int position = 0;
    COMPCOLL_UNROLL for (int r = 0; r < szp_rows; ++r) {
        const uint32_t code = numbers[r] & mask;
        const int end = position + width;
        word |= shifted_left(0, code, position);
        if ((position ^ end) & 32) {
            *to = word;
            to += szp_lanes;
            word = shifted_left(code, 0, position);
        }
        position = end;
    }
}

// A word of this lane, in shared memory, where it has an index.
__device__ __forceinline__ uint32_t& szp_word(int i) {
    __shared__ uint32_t words[szp_rows][szp_threads];
    return words[i][threadIdx.x];
}

// Add codes to numbers.
__device__ __forceinline__ void add_rows(int width, uint32_t (&numbers)[szp_rows]) {
    uint32_t before = 0;
    COMPCOLL_UNROLL for (int r = 0; r < szp_rows; ++r) {
        const int end = -(r + 1) * width;  // minus the bits up to the code's end
        const uint32_t word = szp_word(~(end >> 5));
        // Move the code to the upper bits, then down with its sign.
        numbers[r] += static_cast<uint32_t>(static_cast<int32_t>(shifted_left(before, word, end)) >> (32 - width));
        before = word;
    }
}

// Call move(i) for each i below a count, a few together, so that their loads are in flight at once.
template <class Move>
__device__ __forceinline__ void for_words(int count, const Move& move) {
    constexpr int many = 4;
    int i = 0;
    COMPCOLL_ROLLED for (; i + many <= count; i += many) {
        COMPCOLL_UNROLL for (int k = 0; k < many; ++k) move(i + k);
    }
    COMPCOLL_ROLLED for (; i < count; ++i) move(i);
}

// Read a lane's words; those from the count on are 0.
__device__ __forceinline__ void read_words(const uint8_t* from, int count, int width) {
    if (is_aligned(from, szp_word_nbytes)) {
        const auto* words = reinterpret_cast<const uint32_t*>(from);
        for_words(count, [&](int i) { szp_word(i) = words[szp_lanes * i]; });
    } else {
        COMPCOLL_ROLLED for (int i = 0; i < count; ++i)
            szp_word(i) = static_cast<uint32_t>(load_bytes(from + szp_row_nbytes * i, szp_word_nbytes));
    }
    COMPCOLL_ROLLED for (int i = count; i < width; ++i) szp_word(i) = 0;
}

// ---- sums of blocks ---------------------------------------------------------------------------------------------------------

// The sum of the terms of a block: integers if all terms are, else values.
template <class T>
struct SzpSum {
    const Parameters& p;
    const SzpBlock<T>& at;
    uint32_t integers[szp_rows];  // differences of neighbours, up to `add_up`
    uint32_t first = 0;
    bool is_raw = false, is_corrupted = false, has_integers = false;
    bool is_above = false;  // a value of the array is too large for integers
    double step;

    __device__ __forceinline__ SzpSum(const Parameters& p, const SzpBlock<T>& at) : p(p), at(at) {
        if (p.add != nullptr) {
            T x[szp_rows];
            load_array(x);
            round_array(x);
        } else {
            COMPCOLL_UNROLL for (int r = 0; r < szp_rows; ++r) integers[r] = 0;
        }
        step = szp_step(p, p.first == 0 ? nullptr : SzpPlaces<T>(p, 0).wire);
        is_raw = is_above;
        has_integers = p.add != nullptr && !is_above;
        for_wires([&](const SzpPlaces<T>& wire, const uint8_t* block, int width) {
            if (block == nullptr) is_corrupted = true;
            if (block == nullptr || width == szp_raw) return void(is_raw = true);
            first += wire.first(at.b);
            has_integers = true;
            if (width == 0) return;
            read_words(block + szp_word_nbytes * at.lane, szp_block_nbytes(width, at.m, sizeof(T)) / szp_row_nbytes, width);
            add_rows(width, integers);
        });
    }

    // The prefix sums of the differences.
    __device__ __forceinline__ void add_up() {
        constexpr int steps = 4;
        static_assert(1 << steps == szp_lanes);
        uint32_t carry = first, is_behind[steps];  // 0 or 1, to multiply by: fewer instructions than to choose
        COMPCOLL_UNROLL for (int k = 0; k < steps; ++k) is_behind[k] = static_cast<uint32_t>(at.lane + szp_lanes - (1 << k)) / szp_lanes;
        COMPCOLL_UNROLL for (int r = 0; r < szp_rows; ++r) {
            uint32_t sum = integers[r];
            COMPCOLL_UNROLL for (int k = 0; k < steps; ++k)
                sum += __shfl_up_sync(0xffffffffu, sum, 1u << k, szp_lanes) * is_behind[k];
            integers[r] = sum += carry;
            if (r + 1 < szp_rows) carry = __shfl_sync(0xffffffffu, sum, szp_lanes - 1, szp_lanes);
        }
    }

    // Whether a block of this warp is raw.
    __device__ __forceinline__ bool any_is_raw() const {
        const int other_is = __shfl_xor_sync(0xffffffffu, static_cast<int>(is_raw), szp_lanes);
        return is_raw || other_is != 0;
    }

    // Call use(row, value) with the sum in float64, after `add_up`: all integers, the array unless it is among them, and the raw
    // blocks in their order.
    template <class Use>
    __device__ __forceinline__ void for_values(const Use& use) const {
        const double scale = p.residual == nullptr ? p.scale : 1.0;
        COMPCOLL_UNROLL for (int r = 0; r < szp_rows; ++r) szp_word(r) = integers[r];
        COMPCOLL_ROLLED for (int r = 0; r < szp_rows; ++r) {
            const int i = szp_lanes * r + at.lane;
            T x[1] = {0};
            uint32_t integer = szp_word(r);
            if (is_above && i < at.m) {
                with_elements<T>(p.add_storage, [&](auto elements) { x[0] = load_element(elements, at.index(r)); });
                feed(r, x);
                integer -= szp_integer(as_double(x[0]), steps_per_unit());
            }
            double value = has_integers ? static_cast<int32_t>(integer) * step : -0.0;
            if (is_above) value += as_double(x[0]) * scale;
            for_wires([&](const SzpPlaces<T>&, const uint8_t* block, int width) {
                if (block != nullptr && width == szp_raw && i < at.m)
                    value += as_double(load_value<T>(block + i * static_cast<int>(sizeof(T))));
            });
            use(r, szp_raw_value<T>(is_corrupted ? quiet_nan<double>() : value));
        }
    }

    // Update the residual by what rounding the array alone loses.
    __device__ __forceinline__ void keep_loss() const {
        const T scale = static_cast<T>(p.residual_scale);
        T* residual = reinterpret_cast<T*>(p.residual);
        T x[szp_rows];
        load_array(x);
        at.for_rows([&](int r, int64_t i) {
            const auto integer = static_cast<int32_t>(szp_integer(as_double(x[r]), steps_per_unit()));
            T kept = finite_loss(x[r], is_above ? x[r] : szp_value<T>(integer * step), scale);
            if (!at.has(r)) return;
            if (!p.feed) kept = exact_sum(residual[i], kept);
            residual[i] = kept;
        });
    }

private:
    __device__ __forceinline__ double steps_per_unit() const { return bits_as<double>(p.rng_counter); }

    // Call use(wire, block, width) for each wire. All threads of a warp do.
    template <class Use>
    __device__ __forceinline__ void for_wires(const Use& use) const {
        COMPCOLL_ROLLED for (int w = 0; w < p.first; ++w) {
            const SzpPlaces<T> wire(p, w);
            const uint8_t* block = wire.block(at);
            use(wire, block, wire.width(at.b));
        }
    }

    template <class Elements>
    __device__ __forceinline__ T load_element(Elements, int64_t i) const {
        return Elements::widened(reinterpret_cast<const typename Elements::Stored*>(p.add)[i]);
    }

    __device__ __forceinline__ void load_array(T (&x)[szp_rows]) const {
        with_elements<T>(p.add_storage, [&](auto elements) {
            at.for_rows([&](int r, int64_t i) { x[r] = load_element(elements, i); });
        });
        feed(0, x);
    }

    // With a residual: values of rows times the scale, plus the residual.
    template <int many>
    __device__ __forceinline__ void feed(int row, T (&x)[many]) const {
        if (p.residual == nullptr) return;
        const T scale = static_cast<T>(p.scale);
        const T* residual = reinterpret_cast<const T*>(p.residual);
        COMPCOLL_UNROLL for (int k = 0; k < many; ++k) {
            x[k] = exact_product(x[k], scale);
            if (p.feed) x[k] = exact_sum(x[k], residual[at.index(row + k)]);
        }
    }

    __device__ __forceinline__ void round_array(const T (&x)[szp_rows]) {
        const auto limit = static_cast<SignedOf<T>>(p.position);
        const int left_lane = (at.lane + szp_lanes - 1) % szp_lanes;
        uint32_t before = 0;
        COMPCOLL_UNROLL for (int r = 0; r < szp_rows; ++r) {
            is_above = is_above || compcoll::is_above(x[r], limit);
            const uint32_t integer = szp_integer(as_double(x[r]), steps_per_unit());
            // The first lane's neighbour is the last lane, in the row before.
            const uint32_t given = at.lane == szp_lanes - 1 ? before : integer;
            uint32_t left = __shfl_sync(0xffffffffu, given, left_lane, szp_lanes);
            if (r == 0) {
                first = __shfl_sync(0xffffffffu, integer, 0, szp_lanes);
                if (at.lane == 0) left = integer;
            }
            integers[r] = integer - left;
            before = integer;
        }
        is_above = over_lanes(static_cast<uint32_t>(is_above), AnyBit()) != 0;
    }
};

template <class T>
__device__ __forceinline__ void encode_szp(const Parameters& p) {
    if (first_thread() == 0) store_bytes(p.out, bits_as<uint64_t>(szp_step(p, p.first == 0 ? nullptr : SzpPlaces<T>(p, 0).wire)), 8);
    if (p.blocks == 0) return;
    const SzpBlock<T> at(p);
    SzpSum<T> sum(p, at);
    uint32_t changes = 0;
    COMPCOLL_UNROLL for (int r = 0; r < szp_rows; ++r) changes |= sum.integers[r] ^ (sum.integers[r] + sum.integers[r]);
    changes = over_lanes(changes, AnyBit());
    const int width = sum.is_raw ? szp_raw : changes == 0 ? 0 : 32 - leading_zeros(changes);
    uint8_t *firsts = p.out + szp_header_nbytes, *widths = firsts + 4 * p.blocks;
    if (at.lane == 0 && at.exists) {
        store_bytes(firsts + 4 * at.b, sum.is_raw ? 0 : sum.first, 4);
        widths[at.b] = static_cast<uint8_t>(width);
        if (at.b == p.blocks - 1)
            for (int64_t pad = p.blocks; pad % 4 != 0; ++pad) widths[pad] = 0;
    }
    if (at.exists && !sum.is_raw) pack_rows(sum.integers, width, reinterpret_cast<uint32_t*>(at.slot(p)) + at.lane);
    if (sum.any_is_raw()) {
        sum.add_up();
        T* slot = reinterpret_cast<T*>(at.slot(p)) + at.lane;
        sum.for_values([&](int r, T value) {
            if (sum.is_raw && at.has(r)) slot[szp_lanes * r] = value;
        });
    }
    if (p.residual != nullptr) sum.keep_loss();
}

template <class T>
__device__ __forceinline__ void move_blocks(const Parameters& p) {
    const SzpBlock<T> at(p);
    const SzpPlaces<T> wire(p, 0);
    auto* to = const_cast<uint8_t*>(wire.block(at));
    if (!at.exists) return;
    to += szp_word_nbytes * at.lane;
    const auto* from = reinterpret_cast<const uint32_t*>(at.slot(p)) + at.lane;
    // A raw block may end within a row.
    const int nbytes = szp_block_nbytes(wire.width(at.b), at.m, sizeof(T)) - szp_word_nbytes * at.lane;
    const int count = (nbytes + szp_row_nbytes - 1) / szp_row_nbytes;
    if (is_aligned(to, szp_word_nbytes)) {
        auto* words = reinterpret_cast<uint32_t*>(to);
        for_words(count, [&](int i) { words[szp_lanes * i] = from[szp_lanes * i]; });
    } else {
        COMPCOLL_ROLLED for (int i = 0; i < count; ++i) store_bytes(to + szp_row_nbytes * i, from[szp_lanes * i], szp_word_nbytes);
    }
}

template <class T>
__device__ __forceinline__ void decode_szp(const Parameters& p) {
    const SzpBlock<T> at(p);
    SzpSum<T> sum(p, at);
    sum.add_up();
    with_elements<T>(p.out_storage, [&](auto elements) {
        using Elements = decltype(elements);
        auto* out = reinterpret_cast<typename Elements::Stored*>(p.out);
        if (sum.any_is_raw()) {
            sum.for_values([&](int r, T value) {
                if (sum.is_raw && at.has(r)) out[at.index(r)] = Elements::narrowed(value);
            });
        }
        if (sum.is_raw || !at.exists) return;
        at.for_rows([&](int r, int64_t i) {
            const T value = szp_value<T>(static_cast<int32_t>(sum.integers[r]) * sum.step);
            if (at.m == szp_block || at.has(r)) out[i] = Elements::narrowed(value);
        });
    });
}

template <class T>
__device__ __forceinline__ void find_largest(const Parameters& p) {
    SignedOf<T> largest[1] = {0};
    for_values<8>(p.n, [&](const Values& at) {
        T x[8];
        at.load(p.add, p.add_storage, x);
        if (p.residual != nullptr) {
            multiply(p, x);
            if (p.feed) add_loaded(residual_at<T>(p, at), x);
        }
        COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) {
            const auto magnitude = magnitude_bits(x[k]);
            if ((p.variant == 0 || magnitude < infinity_bits<T>) && magnitude > largest[0]) largest[0] = magnitude;
        }
    });
    reduce_warp(largest, Larger());
    if (lane_of_warp() == 0) reinterpret_cast<T*>(p.out)[first_thread() / warp_threads] = bits_as<T>(largest[0]);
}

}  // namespace compcoll
