// Codecs with blocks of 32, 64, 128 … 2048 values, known at compile time: a warp processes a tile of 2048 values in its registers,
// in sixteen rounds of 128 values (device_rounds.h). A round holds several blocks if these are short.
//
// The last, short block and all other block sizes use device_blocks.h.
#pragma once

#include "device_blocks.h"
#include "device_records.h"

namespace compcoll {

constexpr int tile_rounds = 16, lane_values = 4 * tile_rounds;

// ---- codes ------------------------------------------------------------------------------------------------------------------
// A lane has four codes in a word, one per byte. In the wire, a round has `4·bits` bytes for each eight lanes.

// Transpose nibbles: each of eight lanes has a nibble of each of eight rounds, that of round r in bits 4r …. It gets all nibbles of
// one round, that of lane s in bits 4s …. It is its own inverse.
__device__ __forceinline__ uint32_t transposed_nibbles(uint32_t mine) {
    const int lane = lane_of_warp();
    const auto step = [&](int distance, uint32_t low, int shift) {
        const uint32_t theirs = __shfl_xor_sync(0xffffffffu, mine, distance);
        mine = lane & distance ? (mine & ~low) | (theirs >> shift & low) : (mine & low) | (theirs & low) << shift;
    };
    step(4, 0x0000ffff, 16);
    step(2, 0x00ff00ff, 8);
    step(1, 0x0f0f0f0f, 4);
    return mine;
}

// Exchange words of two rounds, so that each lane has eight adjacent codes: an even lane gives its word of the second round for its
// neighbour's word of the first round, and an odd lane the reverse. It is its own inverse.
__device__ __forceinline__ void swap_with_neighbour(uint32_t (&pair)[2]) {
    const bool is_odd = lane_of_warp() % 2 != 0;
    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, is_odd ? pair[0] : pair[1], 1);
    if (is_odd) pair[0] = theirs;
    else pair[1] = theirs;
}

// The offset of a lane's eight codes: a warp's access of 256 bytes then touches at most one extra sector if misaligned, rather than
// two.
__device__ __forceinline__ int place_of_eight() { return round_values * (lane_of_warp() % 2) + 8 * (lane_of_warp() / 2); }

// `place` has the lowest bits of the codes' address. For codes in shared memory (`staged`), the compiler knows them.
template <int bits, bool staged, int rounds>
__device__ __forceinline__ void store_rounds(uint8_t* codes, size_t place, const uint32_t (&word)[rounds]) {
    const int lane = lane_of_warp();
    if (bits == 8 && !staged && rounds % 2 == 0 && place % 8 == 0) {
        COMPCOLL_UNROLL for (int r = 0; r + 1 < rounds; r += 2) {
            uint32_t pair[2] = {word[r], word[r + 1]};
            swap_with_neighbour(pair);
            store_words(codes + place_of_eight() + round_values * r, pair);
        }
    } else if constexpr (bits == 1) {
        COMPCOLL_UNROLL for (int first = 0; first < rounds; first += 8) {
            uint32_t nibbles = 0;
            COMPCOLL_UNROLL for (int r = 0; r < 8; ++r) {
                const uint32_t pairs = word[first + r] | word[first + r] >> 7;
                nibbles |= ((pairs | pairs >> 14) & 15) << 4 * r;
            }
            store_bytes(codes + 16 * (first + lane % 8) + 4 * (lane / 8), transposed_nibbles(nibbles), 4);
        }
    } else if (place % (bits / 2) == 0) {
        COMPCOLL_UNROLL for (int r = 0; r < rounds; ++r) {
            uint8_t* to = codes + (16 * r * bits + lane * bits / 2);
            const uint32_t packed_word = static_cast<uint32_t>(bits == 8 ? word[r] : packed(word[r], bits));
            if constexpr (bits == 8) *reinterpret_cast<uint32_t*>(to) = packed_word;
            else if constexpr (bits == 4) *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(packed_word);
            else *to = static_cast<uint8_t>(packed_word);
        }
    } else if (bits == 8 && place % 2 == 0) {
        COMPCOLL_UNROLL for (int r = 0; r < rounds; ++r) {
            uint16_t* to = reinterpret_cast<uint16_t*>(codes + round_values * r) + 2 * lane;
            to[0] = static_cast<uint16_t>(word[r]), to[1] = static_cast<uint16_t>(word[r] >> 16);
        }
    } else {
        COMPCOLL_UNROLL for (int r = 0; r < rounds; ++r)
            store_bytes(codes + (16 * r * bits + lane * bits / 2), bits == 8 ? word[r] : packed(word[r], bits), bits / 2);
    }
}

template <int bits, bool staged, int rounds>
__device__ __forceinline__ void load_rounds(const uint8_t* codes, size_t place, uint32_t (&word)[rounds]) {
    const int lane = lane_of_warp();
    if (bits == 8 && !staged && rounds % 2 == 0 && place % 8 == 0) {
        COMPCOLL_UNROLL for (int r = 0; r + 1 < rounds; r += 2) {
            uint32_t pair[2];
            load_words(codes + place_of_eight() + round_values * r, pair);
            swap_with_neighbour(pair);
            word[r] = pair[0], word[r + 1] = pair[1];
        }
    } else if constexpr (bits == 1) {
        COMPCOLL_UNROLL for (int first = 0; first < rounds; first += 8) {
            const auto stored = static_cast<uint32_t>(load_bytes(codes + 16 * (first + lane % 8) + 4 * (lane / 8), 4));
            const uint32_t nibbles = transposed_nibbles(stored);
            COMPCOLL_UNROLL for (int r = 0; r < 8; ++r) word[first + r] = (nibbles >> 4 * r & 15) * 0x00204081u & 0x01010101u;
        }
    } else if (bits == 8 && place % 4 == 2) {
        COMPCOLL_UNROLL for (int r = 0; r < rounds; ++r) {
            const uint16_t* from = reinterpret_cast<const uint16_t*>(codes + round_values * r) + 2 * lane;
            word[r] = from[0] | uint32_t(from[1]) << 16;
        }
    } else {
        const bool aligned = place % (bits / 2) == 0;
        COMPCOLL_UNROLL for (int r = 0; r < rounds; ++r) {
            const uint8_t* from = codes + (16 * r * bits + lane * bits / 2);
            uint32_t stored;
            if (!aligned) stored = static_cast<uint32_t>(load_bytes(from, bits / 2));
            else if constexpr (bits == 8) stored = *reinterpret_cast<const uint32_t*>(from);
            else if constexpr (bits == 4) stored = *reinterpret_cast<const uint16_t*>(from);
            else stored = *from;
            word[r] = bits == 8 ? stored : static_cast<uint32_t>(unpacked(stored, bits));
        }
    }
}

// ---- a tile -----------------------------------------------------------------------------------------------------------------

// Codes of short blocks: records of any length align them to nothing.
template <int bits>
__device__ __forceinline__ void store_four(uint8_t* to, uint32_t word) {
    if constexpr (bits == 4) {
        const uint32_t pairs = word | word >> 4;
        to[0] = static_cast<uint8_t>(pairs), to[1] = static_cast<uint8_t>(pairs >> 16);
    } else {
        const auto bytes = static_cast<uint32_t>(bits == 8 ? word : packed(word, bits));
        COMPCOLL_UNROLL for (int i = 0; i < bits / 2; ++i) to[i] = static_cast<uint8_t>(bytes >> 8 * i);
    }
}

template <int bits>
__device__ __forceinline__ uint32_t load_four(const uint8_t* from) {
    uint32_t bytes = 0;
    COMPCOLL_UNROLL for (int i = 0; i < bits / 2; ++i) bytes |= uint32_t(from[i]) << 8 * i;
    return bits == 8 ? bytes : static_cast<uint32_t>(unpacked(bytes, bits));
}

// Each lane gets combine(…) of the numbers of each `lanes` adjacent ones.
template <int lanes, class Number, int many, class Combine>
__device__ __forceinline__ void reduce_lanes(Number (&number)[many], Combine combine) {
    COMPCOLL_UNROLL for (int distance = lanes / 2; distance > 0; distance /= 2) {
        COMPCOLL_UNROLL for (int k = 0; k < many; ++k)
            number[k] = combine(number[k], __shfl_xor_sync(0xffffffffu, number[k], distance));
    }
}

// Each lane gets combine(…) of the numbers of all lanes in the warp.
template <class Number, int many, class Combine>
__device__ __forceinline__ void reduce_warp(Number (&number)[many], Combine combine) { reduce_lanes<warp_threads>(number, combine); }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <int many>
__device__ __forceinline__ void reduce_warp(int32_t (&number)[many], Larger) {
    COMPCOLL_UNROLL for (int k = 0; k < many; ++k) number[k] = __reduce_max_sync(0xffffffffu, number[k]);
}
#endif

// A lane's values of one block of a tile, and the codec's view of them.
template <class Code, int bits, int block>
struct WarpBlock {
    using T = typename Code::Value;
    static constexpr bool is_short = block < round_values;
    static constexpr int lanes = is_short ? block / 4 : warp_threads, rounds = is_short ? 1 : block / round_values, many = 4 * rounds;

    // The index in a tile of the block that has this lane's values of a round.
    __device__ __forceinline__ static int index(int round) { return round / rounds * (warp_threads / lanes) + lane_of_warp() / lanes; }
    __device__ __forceinline__ static int lane() { return lane_of_warp() % lanes; }

    __device__ __forceinline__ static typename Code::Header header_of(const Code& code, const T (&x)[many]) {
        typename Code::Signed maxima[Code::maxima_count];
        COMPCOLL_UNROLL for (int k = 0; k < Code::maxima_count; ++k) maxima[k] = Code::least;
        code.survey(x, many, maxima);
        if constexpr (is_short) reduce_lanes<lanes>(maxima, Larger());
        else reduce_warp(maxima, Larger());
        int64_t sums[Code::sums_count] = {};
        if (code.needs_sums(maxima)) {  // uniform over the warp
            code.add_up(x, maxima, sums);
            reduce_warp(sums, Sum());
        }
        return code.header(maxima, sums, block);
    }

    // The random words of each eight values are computed once, by even lanes for even rounds and by odd lanes for odd rounds.
    // Adjacent lanes then exchange halves.
    __device__ __forceinline__ static void random_of(const Code& code, int64_t begin, int r, uint32_t (&even)[2], uint32_t (&odd)[2]) {
        const int lane = lane_of_warp();
        const bool is_odd = lane % 2 != 0;
        const auto made = code.random_at(begin + (r + (is_odd ? 1 : 0)) * round_values + lane / 2 * 8);
        COMPCOLL_UNROLL for (int k = 0; k < 2; ++k) {
            const uint32_t kept = is_odd ? made.words[2 + k] : made.words[k];
            const uint32_t got = __shfl_xor_sync(0xffffffffu, is_odd ? made.words[k] : made.words[2 + k], 1);
            even[k] = is_odd ? got : kept;
            odd[k] = is_odd ? kept : got;
        }
    }

    __device__ __forceinline__ static void codes_of(const Code& code, typename Code::Header header, const T (&x)[many], int64_t begin,
                                                    uint32_t (&word)[rounds]) {
        if constexpr (is_short) word[0] = code.word_of(header, x);
        else code.with_encoder(header, [&](auto encoder) {
            if constexpr (Code::with_random) {
                static_assert(rounds % 2 == 0, "two rounds share their random numbers");
                COMPCOLL_UNROLL for (int r = 0; r < rounds; r += 2) {
                    uint32_t random[2][2];
                    random_of(code, begin, r, random[0], random[1]);
                    COMPCOLL_UNROLL for (int o = 0; o < 2; ++o) {
                        word[r + o] = 0;
                        COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) {
                            const auto own = static_cast<uint16_t>(random[o][k / 2] >> k % 2 * 16);
                            word[r + o] |= uint32_t(encoder.code(x[4 * (r + o) + k], own)) << 8 * k;
                        }
                    }
                }
            } else {
                COMPCOLL_UNROLL for (int r = 0; r < rounds; ++r) word[r] = four_codes(encoder, reinterpret_cast<const T(&)[4]>(x[4 * r]));
            }
        });
    }
};

// Records of a tile in shared memory; headers are aligned.
template <class Code, int bits, int block>
struct TileRecords : WarpRecords<tile_rounds * round_values / block * (Code::staged_header + block / 8 * bits)> {
    using Header = typename Code::Header;
    static_assert(Code::staged_header == 0 || block / 8 * bits % sizeof(Header) == 0, "headers are aligned");
};

// x += D(wire), for the tile's blocks from the b-th on.
template <class Code, int bits, int block>
__device__ __forceinline__ void add_tile(const Code& code, const uint8_t* wire, int64_t b, typename Code::Value (&x)[lane_values]) {
    using T = typename Code::Value;
    using Header = typename Code::Header;
    using Block = WarpBlock<Code, bits, block>;
    constexpr int rounds = Block::rounds;
    constexpr bool staged = Code::staged_header != 0;
    const auto add = [&](const uint8_t* records, size_t place) {
        COMPCOLL_UNROLL for (int first = 0; first < tile_rounds; first += rounds) {
            const int64_t from = code.layout.record(Block::index(first)), codes = from + code.layout.header_nbytes;
            uint32_t word[rounds];
            if constexpr (Block::is_short) word[0] = load_four<bits>(records + codes + Block::lane() * bits / 2);
            else load_rounds<bits, staged>(records + codes, place + static_cast<size_t>(codes), word);
            Header header;
            if constexpr (staged) header = *reinterpret_cast<const Header*>(records + from);
            else header = code.load_header(records + from);
            if constexpr (Block::is_short) {
                T value[4];
                code.with_decoder(header, [&](auto decoder) { four_values(decoder, word[0], value); });
                code.rotate_back_in_warp(header, value);
                compcoll::add(reinterpret_cast<T(&)[4]>(x[4 * first]), value);
            } else {
                code.with_decoder(header, [&](auto decoder) {
                    COMPCOLL_UNROLL for (int r = 0; r < rounds; ++r) {
                        T value[4];
                        four_values(decoder, word[r], value);
                        compcoll::add(reinterpret_cast<T(&)[4]>(x[4 * (first + r)]), value);
                    }
                });
            }
        }
    };
    const uint8_t* records = wire + code.layout.record(b);
    if constexpr (staged) {
        using Records = TileRecords<Code, bits, block>;
        Records::read(records, [&] { add(Records::at(), 0); });
    } else {
        add(records, reinterpret_cast<size_t>(records));
    }
}

// x = add · scale + D(wires[0]) + …
template <bool plain, class Code, int bits, int block>
__device__ __forceinline__ void sum_tile(const Parameters& p, const Code& code, int64_t b, typename Code::Value (&x)[lane_values]) {
    using T = typename Code::Value;
    if (plain || p.add != nullptr) {
        const RoundsOf<T> add(p.add, add_storage_of(p), b * block);
        COMPCOLL_UNROLL for (int r = 0; r < tile_rounds; ++r) add.load(r, *reinterpret_cast<T(*)[4]>(&x[4 * r]));
    } else {
        COMPCOLL_UNROLL for (int k = 0; k < lane_values; ++k) x[k] = -T(0);  // the neutral element of addition
    }
    if constexpr (!plain) {
        if (p.add != nullptr) multiply(p, x);
        COMPCOLL_ROLLED for (int w = 0; w < p.wire_count; ++w)
            add_tile<Code, bits, block>(code, p.wires[w], b, x);
    }
}

template <bool plain, class Code, int bits, int block>
__device__ __forceinline__ void encode_tile(const Parameters& p, const Code& code, int64_t b) {
    using T = typename Code::Value;
    using Block = WarpBlock<Code, bits, block>;
    constexpr bool staged = Code::staged_header != 0;
    T x[lane_values];
    sum_tile<plain, Code, bits, block>(p, code, b, x);
    if constexpr (!plain) {
        if (p.residual != nullptr && p.feed) {
            const RoundsOf<T> residual(p.residual, computed_storage<T>, b * block);
            COMPCOLL_UNROLL for (int r = 0; r < tile_rounds; ++r)
                add_loaded(RoundOf<T>{residual, r}, reinterpret_cast<T(&)[4]>(x[4 * r]));
        }
    }
    const auto encode = [&](int first, uint8_t* record, size_t place) {
        T own[Block::many];
        COMPCOLL_UNROLL for (int k = 0; k < Block::many; ++k) own[k] = x[4 * first + k];
        if constexpr (Block::is_short) code.rotate_in_warp(own);
        const int64_t begin = b * block + first * round_values;
        const typename Code::Header header = Block::header_of(code, own);
        uint32_t word[Block::rounds];
        Block::codes_of(code, header, own, begin, word);
        if (Block::lane() == 0) {
            if constexpr (staged) *reinterpret_cast<typename Code::Header*>(record) = header;
            else code.store_header(record, header);
        }
        uint8_t* codes = record + code.layout.header_nbytes;
        if constexpr (Block::is_short) store_four<bits>(codes + Block::lane() * bits / 2, word[0]);
        else store_rounds<bits, staged>(codes, place + static_cast<size_t>(code.layout.header_nbytes), word);
        if constexpr (!plain) {
            if (p.residual == nullptr && p.decoded == nullptr) return;
            const RoundsOf<T> residual(p.residual, computed_storage<T>, begin), decoded(p.decoded, out_storage_of(p), begin);
            constexpr int few = Block::rounds < 4 ? Block::rounds : 4;  // limited by the free registers
            COMPCOLL_UNROLL for (int from = 0; from < Block::rounds; from += few) {
                T got[few][4];
                code.with_decoder(header, [&](auto decoder) {
                    COMPCOLL_UNROLL for (int r = 0; r < few; ++r) four_values(decoder, word[from + r], got[r]);
                });
                if constexpr (Block::is_short) code.rotate_back_in_warp(header, got[0]);
                COMPCOLL_UNROLL for (int r = from; r < from + few; ++r) {
                    const auto& wanted = reinterpret_cast<const T(&)[4]>(x[4 * (first + r)]);
                    conclude(p, RoundOf<T>{residual, r}, RoundOf<T>{decoded, r}, wanted, got[r - from]);
                }
            }
        }
    };
    const auto encode_all = [&](uint8_t* records, size_t place) {
        COMPCOLL_UNROLL for (int first = 0; first < tile_rounds; first += Block::rounds) {
            const int64_t record = code.layout.record(Block::index(first));
            encode(first, records + record, place + static_cast<size_t>(record));
        }
    };
    uint8_t* records = p.out + code.layout.record(b);
    if constexpr (staged) {
        using Records = TileRecords<Code, bits, block>;
        Records::write(records, [&] { encode_all(Records::at(), 0); });
    } else {
        encode_all(records, reinterpret_cast<size_t>(records));
    }
}

// ---- all of an array --------------------------------------------------------------------------------------------------------

// Call work(first block) for whole tiles, and rest(first block, end) for the blocks after them.
template <int block, class Work, class Rest>
__device__ __forceinline__ void for_tiles(const Parameters& p, const Work& work, const Rest& rest) {
    constexpr int blocks = tile_rounds * round_values / block;
    const int64_t warps = all_threads() / warp_threads, tiles = (p.blocks + blocks - 1) / blocks;
    for (int64_t tile = first_thread() / warp_threads; tile < tiles; tile += warps) {
        const int64_t b = tile * blocks;
        if ((b + blocks) * block <= p.n) {
            work(b);
        } else {
            rest(b, b + blocks < p.blocks ? b + blocks : p.blocks);
        }
    }
}

template <bool plain, int bits, int block, class Code>
__device__ __forceinline__ void encode_tiles(const Parameters& p, const Code& code) {
    for_tiles<block>(
        p, [&](int64_t b) { encode_tile<plain, Code, bits, block>(p, code, b); },
        [&](int64_t b, int64_t end) { encode_by_warp<plain>(p, code, b, end); });
}

template <int bits, int block, class Code>
__device__ __forceinline__ void decode_tiles(const Parameters& p, const Code& code) {
    using T = typename Code::Value;
    for_tiles<block>(
        p,
        [&](int64_t b) {
            T x[lane_values];
            sum_tile<false, Code, bits, block>(p, code, b, x);
            const RoundsOf<T> out(p.out, out_storage_of(p), b * block);
            COMPCOLL_UNROLL for (int r = 0; r < tile_rounds; ++r) out.store(r, *reinterpret_cast<const T(*)[4]>(&x[4 * r]));
        },
        [&](int64_t b, int64_t) {
            COMPCOLL_ROLLED for (int64_t i = b * block + Code::many * lane_of_warp(); i < p.n; i += Code::many * warp_threads)
                decode_values(p, code, Values{i, p.n - i < Code::many ? static_cast<int>(p.n - i) : Code::many});
        });
}

}  // namespace compcoll
