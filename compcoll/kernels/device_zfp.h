// ZFP on a GPU, with one thread per block of four values and the tables in shared memory. A warp's 32 blocks fill exactly maxbits
// words of 32 bits. So warps never share a word of the wire, and no clearing or atomic writes are needed there.
#pragma once

#include "device_rounds.h"
#include "zfp_thread.h"

namespace compcoll {

alignas(128) __device__ constexpr Table encode_table_source = make_encode_table();
alignas(128) __device__ constexpr Table decode_table_source = make_decode_table();

// Copy a table to shared memory, by all 256 threads of a thread block.
__device__ __forceinline__ void copy_table(const Table& from, uint32_t (&to)[zfp::table_entries]) {
    COMPCOLL_UNROLL for (int i = 0; i < zfp::table_entries; i += 256) to[i + threadIdx.x] = from.entry[i + threadIdx.x];
    __syncthreads();
}

// Codes of at most 64·W bits; with `half`, of at most 32.
template <class T, int W, bool half>
struct ZFPCode {
    static constexpr bool one_word = W == 1;
    int maxbits;
    int plain_nbytes;  // bytes of a block's code if it has 16, 32 or 64 bits; else 0
    int64_t blocks, wire_words;  // words of 32 bits
    const uint32_t* decode_table;

    __device__ __forceinline__ ZFPCode(const Parameters& p, const uint32_t* decode_table)
        : maxbits(first_of(p)), plain_nbytes(first_of(p) == 16 || first_of(p) == 32 || first_of(p) == 64 ? first_of(p) / 8 : 0), blocks(p.blocks), wire_words((blocks * maxbits + 63) / 64 * 2),
          decode_table(decode_table) {}

    __device__ __forceinline__ zfp::Bits<W> load(const uint8_t* wire, int64_t block) const {
        zfp::Bits<W> code;
        if (plain_nbytes != 0) {
            code.word[0] = load_bytes(wire + block * plain_nbytes, plain_nbytes);
            return code;
        }
        const int64_t at = block * maxbits;
        const int skipped = static_cast<int>(at & 63);
        const uint8_t* from = wire + (at >> 6) * 8;
        uint64_t word = load_bytes(from, 8);
        COMPCOLL_UNROLL for (int w = 0; w < W; ++w) {
            const uint64_t next = skipped + maxbits > 64 * (w + 1) ? load_bytes(from + 8 * (w + 1), 8) : 0;
            code.word[w] = word >> skipped | next << 1 << (63 - skipped);
            word = next;
        }
        code.truncate(maxbits);
        return code;
    }

    // `plain`: blocks are aligned and have plain_nbytes each.
    template <bool plain>
    __device__ __forceinline__ void decode(const uint8_t* wire, int64_t block, T (&x)[4]) const {
        zfp::Bits<W> code;
        if constexpr (!plain) code = load(wire, block);
        else if constexpr (!half) code.word[0] = reinterpret_cast<const uint64_t*>(wire)[block];
        else code.word[0] = plain_nbytes == 4 ? reinterpret_cast<const uint32_t*>(wire)[block] : reinterpret_cast<const uint16_t*>(wire)[block];
        zfp::decode_by_table<T, W, half>(code, maxbits, x, decode_table);
    }

    template <bool plain>
    __device__ __forceinline__ void store(uint8_t* wire, int64_t block, const zfp::Bits<W>& code) const {
        if constexpr (!plain) store_any(wire, block, code);
        else if constexpr (!half) reinterpret_cast<uint64_t*>(wire)[block] = code.word[0];
        else if (plain_nbytes == 4) reinterpret_cast<uint32_t*>(wire)[block] = static_cast<uint32_t>(code.word[0]);
        else reinterpret_cast<uint16_t*>(wire)[block] = static_cast<uint16_t>(code.word[0]);
    }

    // All lanes of a warp call this together, with consecutive blocks.
    __device__ __forceinline__ void store_any(uint8_t* wire, int64_t block, const zfp::Bits<W>& code) const {
        if (plain_nbytes != 0) {
            if (block * plain_nbytes < wire_words * 4) store_bytes(wire + block * plain_nbytes, code.word[0], plain_nbytes);
            return;
        }
        __shared__ uint32_t of_warps[8][64 * W];
        uint32_t* const words = of_warps[threadIdx.x / 32];
        const int lane = static_cast<int>(threadIdx.x % 32);
        for (int w = lane; w < maxbits; w += 32) words[w] = 0;
        __syncwarp();
        COMPCOLL_UNROLL for (int w = 0; w < 2 * W; ++w) {
            const uint32_t bits = static_cast<uint32_t>(code.word[w / 2] >> 32 * (w % 2));
            const int at = lane * maxbits + 32 * w, skipped = at % 32;
            if (bits != 0) atomicOr(words + at / 32, bits << skipped);
            if (skipped != 0 && bits >> (32 - skipped) != 0) atomicOr(words + at / 32 + 1, bits >> (32 - skipped));
        }
        __syncwarp();
        const int64_t first = (block - lane) / 32 * maxbits;
        // The last warp also writes the wire's padding: one word if the number of words is odd.
        const int count = block - lane + 32 < blocks ? maxbits : static_cast<int>(wire_words - first);
        for (int w = lane; w < count; w += 32) store_bytes(wire + 4 * (first + w), w < maxbits ? words[w] : 0, 4);
    }
};

// A lane's block in a warp's round of an array; the round may be cut short by the end of the array.
template <class T>
struct AnyRound {
    static constexpr bool plain = false;
    int64_t i, block;  // indices of the first value and of the block
    int count;         // of existing values in the block
    bool whole;        // whether all values of the round exist

    __device__ __forceinline__ AnyRound(const Parameters& p, int64_t i)
        : i(i), block(i >> 2), count(p.n - i >= 4 ? 4 : p.n > i ? static_cast<int>(p.n - i) : 0), whole(i - 4 * lane_of_warp() + round_values <= p.n) {}

    __device__ __forceinline__ void load(const uint8_t* array, int storage, T (&x)[4]) const {
        if (whole) RoundsOf<T>(array, storage, i - 4 * lane_of_warp()).load(0, x);
        else load_values(array, storage, i, count, x);
    }
    __device__ __forceinline__ void store(uint8_t* array, int storage, const T (&x)[4]) const {
        if (whole) RoundsOf<T>(array, storage, i - 4 * lane_of_warp()).store(0, x);
        else store_values(array, storage, i, count, x);
    }
};

// A whole round, with aligned arrays of T and aligned wires of plain blocks: it needs no further checks.
template <class T>
struct AlignedRound {
    static constexpr bool plain = true;
    static constexpr int count = zfp::block_size;
    int64_t i, block;

    __device__ __forceinline__ explicit AlignedRound(int64_t i) : i(i), block(i >> 2) {}

    __device__ __forceinline__ void load(const uint8_t* array, int, T (&x)[4]) const {
        BitsOf<T> bits[4];
        load_aligned(array + i * static_cast<int64_t>(sizeof(T)), bits);
        COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) x[k] = bits_as<T>(bits[k]);
    }
    __device__ __forceinline__ void store(uint8_t* array, int, const T (&x)[4]) const {
        BitsOf<T> bits[4];
        COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) bits[k] = bits_as<BitsOf<T>>(x[k]);
        store_aligned(array + i * static_cast<int64_t>(sizeof(T)), bits);
    }
};

// x = add · scale + D(wires[0]) + …
template <bool plain, class T, class Code, class Round>
__device__ __forceinline__ void sum_round(const Parameters& p, const Code& code, const Round& round, T (&x)[4]) {
    COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) x[k] = -T(0);  // the neutral element of addition
    if (plain || p.add != nullptr) round.load(p.add, add_storage_of(p), x);
    if constexpr (!plain) {
        if (p.add != nullptr) multiply(p, x);
        if (round.count == 0) return;
        COMPCOLL_ROLLED for (int w = 0; w < p.wire_count; ++w) {
            T term[4];
            code.template decode<Round::plain>(p.wires[w], round.block, term);
            add(x, term);
        }
    }
}

// Call work(round) for all rounds; `wire` is the wire to write.
template <class T, class Code, class Work>
__device__ __forceinline__ void for_rounds(const Parameters& p, const Code& code, const uint8_t* out, const uint8_t* wire, const Work& work) {
    int64_t i = first_thread() * zfp::block_size;
    const int64_t step = all_threads() * zfp::block_size;
    if constexpr (Code::one_word) {
        const auto address = [](const void* of) { return reinterpret_cast<size_t>(of); };
        size_t arrays = address(p.add) | address(p.residual) | address(p.decoded) | address(out), wires = address(wire);
        COMPCOLL_ROLLED for (int w = 0; w < p.wire_count; ++w) wires |= address(p.wires[w]);
        const bool as_computed = (p.add == nullptr || add_storage_of(p) == computed_storage<T>) &&
                                 ((out == nullptr && p.decoded == nullptr) || out_storage_of(p) == computed_storage<T>);
        if (as_computed && code.plain_nbytes != 0 && (arrays & 15) == 0 && (wires & static_cast<size_t>(code.plain_nbytes - 1)) == 0) {
            const int64_t last = p.n - round_values + zfp::block_size * lane_of_warp();
            COMPCOLL_ROLLED for (; i <= last; i += step) work(AlignedRound<T>(i));
        }
    }
    const int64_t end = (code.blocks + lane_of_warp()) * zfp::block_size;
    COMPCOLL_ROLLED for (; i < end; i += step) work(AnyRound<T>(p, i));
}

template <bool plain, class T, int W, bool half>
__device__ __forceinline__ void encode_zfp(const Parameters& p, const ZFPCode<T, W, half>& code, const uint32_t* encode_table) {
    for_rounds<T>(p, code, nullptr, p.out, [&](auto round) {
        T x[4];
        zfp::Bits<W> bits;
        sum_round<plain>(p, code, round, x);
        if constexpr (!plain) {
            if (p.residual != nullptr && p.feed) add_loaded(residual_at<T>(p, round), x);
        }
        if (round.count > 0) {
            if (round.count < 4) zfp::pad_block(x, round.count);
            bits = zfp::encode_by_table<T, W, half>(x, code.maxbits, encode_table);
        }
        code.template store<round.plain>(p.out, round.block, bits);
        if constexpr (!plain) {
            if (p.residual == nullptr && p.decoded == nullptr) return;
            T got[4];
            zfp::decode_by_table<T, W, half>(bits, code.maxbits, got, code.decode_table);
            conclude(p, round, x, got);
        }
    });
}

// out = terms, for all values
template <class T, int W, bool half>
__device__ __forceinline__ void decode_zfp(const Parameters& p, const ZFPCode<T, W, half>& code) {
    for_rounds<T>(p, code, p.out, nullptr, [&](auto round) {
        T x[4];
        sum_round<false>(p, code, round, x);
        round.store(p.out, out_storage_of(p), x);
    });
}

}  // namespace compcoll
