// Codecs whose blocks have a header, on a GPU: a team of threads encodes a block, with eight values per thread at a time. Headers
// depend on maxima and integer sums only, whose results do not depend on the order within a team.
//
// In blocks of up to eight values per thread, values are read once and stay in registers. In larger blocks they are read again.
#pragma once

#include "device_rounds.h"
#include "packing.h"

namespace compcoll {

// ---- teams ------------------------------------------------------------------------------------------------------------------

struct Team {
    int log_size, size, rank;
    uint32_t lanes;  // mask of the warp's lanes in this team
    int turn = 0;

    __device__ __forceinline__ explicit Team(int log_size) : log_size(log_size), size(1 << log_size), rank(static_cast<int>(threadIdx.x) & (size - 1)) {
        const int lane = static_cast<int>(threadIdx.x) % warp_threads;
        lanes = size < warp_threads ? ((1u << size) - 1) << (lane & ~(size - 1)) : 0xffffffffu;
    }

    __device__ __forceinline__ int64_t index() const { return first_thread() >> log_size; }
    __device__ __forceinline__ int64_t count() const { return all_threads() >> log_size; }

    // Each thread gets combine(…) of all threads' numbers; combine is associative and commutative.
    template <class Number, int many, class Combine>
    __device__ __forceinline__ void reduce(Number (&number)[many], Combine combine) {
        for (int distance = (size < warp_threads ? size : warp_threads) / 2; distance > 0; distance /= 2) {
            COMPCOLL_UNROLL for (int k = 0; k < many; ++k)
                number[k] = combine(number[k], __shfl_xor_sync(lanes, number[k], distance));
        }
        if (size <= warp_threads) return;
        // Two alternating buffers: before one is written again, all threads have passed a barrier after reading it.
        __shared__ Number of_warps[2][most_warps][many];
        Number(&partial)[most_warps][many] = of_warps[turn];
        turn ^= 1;
        const int warp = static_cast<int>(threadIdx.x) / warp_threads;
        if (threadIdx.x % warp_threads == 0) {
            COMPCOLL_UNROLL for (int k = 0; k < many; ++k) partial[warp][k] = number[k];
        }
        __syncthreads();
        for (int other = 0; other < size / warp_threads; ++other) {
            COMPCOLL_UNROLL for (int k = 0; k < many; ++k)
                number[k] = other == 0 ? partial[0][k] : combine(number[k], partial[other][k]);
        }
    }
};

struct Larger {
    template <class Number>
    __device__ __forceinline__ Number operator()(Number a, Number b) const { return a > b ? a : b; }
};
struct Sum {
    template <class Number>
    __device__ __forceinline__ Number operator()(Number a, Number b) const { return a + b; }
};

// ---- where blocks lie in a wire ---------------------------------------------------------------------------------------------

struct Layout {
    int block;  // number of values
    int bits;   // of a code
    int header_nbytes;
    uint32_t eights;  // eights of values in a block

    __device__ __forceinline__ Layout(int block, int bits, int header_nbytes)
        : block(block), bits(bits), header_nbytes(header_nbytes), eights(static_cast<uint32_t>(block) / 8) {}

    __device__ __forceinline__ int64_t record(int64_t index) const { return index * (header_nbytes + int64_t(eights) * bits); }

    // Return the record that holds the i-th value (i is a multiple of 8), and in `eight` the index of its eight in the record.
    __device__ __forceinline__ int64_t record_of(int64_t i, int& eight) const {
        const int64_t all = i / 8;
        if (all >> 32 == 0) {  // 64-bit divisions are slow
            const uint32_t index = static_cast<uint32_t>(all) / eights;
            eight = static_cast<int>(static_cast<uint32_t>(all) - index * eights);
            return record(index);
        }
        const int64_t index = all / eights;
        eight = static_cast<int>(all - index * eights);
        return record(index);
    }

    __device__ __forceinline__ int codes_nbytes(int count) const { return (count * bits + 7) / 8; }

    __device__ __forceinline__ uint64_t load_codes(const uint8_t* record, int eight, int count) const {
        const uint64_t word = load_bytes(record + header_nbytes + eight * bits, codes_nbytes(count));
        return bits == 8 ? word : unpacked(word, bits);
    }
    __device__ __forceinline__ void store_codes(uint8_t* record, int eight, int count, uint64_t codes) const {
        store_bytes(record + header_nbytes + eight * bits, bits == 8 ? codes : packed(codes, bits), codes_nbytes(count));
    }
};

// ---- codecs: the interface for `encode_blocks`, `decode_all` and device_warps.h -----------------------------------------------
//   Header                       the beginning of a record
//   survey(x, count, maxima)     updates maxima, from which (perhaps with sums) `header` follows
//   with_encoder(header, use)    calls use(encoder); encoder.code(x), or with_random encoder.code(x, random), is a value's code
//   with_decoder(header, use)    calls use(decoder); decoder.value(code) is a code's value

COMPCOLL_HD uint8_t code_in(uint64_t codes, int k) { return static_cast<uint8_t>(codes >> 8 * k); }

// For blocks of equal values.
template <class T>
struct OneValue {
    T only;
    COMPCOLL_HD T value(uint8_t) const { return only; }
};
struct NoCode {
    template <class T>
    COMPCOLL_HD uint8_t code(T) const { return 0; }
    template <class T>
    COMPCOLL_HD uint8_t code(T, uint16_t) const { return 0; }
};

// Encode four values as one word with one byte per code, and decode it.
template <class Encoder, class T>
__device__ __forceinline__ uint32_t four_codes(const Encoder& encoder, const T (&x)[4]) {
    uint32_t word = 0;
    COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) word |= uint32_t(encoder.code(x[k])) << 8 * k;
    return word;
}
template <class Decoder, class T>
__device__ __forceinline__ void four_values(const Decoder& decoder, uint32_t word, T (&x)[4]) {
    COMPCOLL_UNROLL for (int k = 0; k < 4; ++k) x[k] = decoder.value(code_in(word, k));
}

// The largest magnitude, compared by its bits.
template <class T, int many>
__device__ __forceinline__ void survey_magnitudes(const T (&x)[many], SignedOf<T> (&maxima)[1]) {
    COMPCOLL_UNROLL for (int k = 0; k < many; ++k) maxima[0] = Larger()(maxima[0], magnitude_bits(x[k]));
}

// `Codec` has the interface of blocks.h. `Code`, the derived struct, overrides what follows where its headers depend on more than the
// largest magnitude.
template <class Code, class Codec>
struct BlockCodec {
    using Value = typename Codec::Value;
    using Header = typename Codec::Header;
    using Signed = SignedOf<Value>;
    static constexpr int many = 8;
    static constexpr int maxima_count = 1, sums_count = 1;
    static constexpr Signed least = 0;
    static constexpr bool with_random = false;
    static constexpr int staged_header = 0;  // sizeof(Header) if it misaligns codes: device_records.h then moves whole records
    Codec codec;
    Layout layout;

    __device__ __forceinline__ explicit BlockCodec(const Parameters& p, int header_nbytes = sizeof(Header))
        : codec(first_of(p)), layout(second_of(p), codec.bits, header_nbytes) {}

    template <int count>
    __device__ __forceinline__ static void survey(const Value (&x)[count], int, Signed (&maxima)[1]) { survey_magnitudes(x, maxima); }
    template <class Maxima>
    __device__ __forceinline__ static bool needs_sums(const Maxima&) { return false; }
    template <class Values, class Maxima, class Sums>
    __device__ __forceinline__ static void add_up(const Values&, const Maxima&, Sums&) {}

    __device__ __forceinline__ static void store_header(uint8_t* record, Header header) {
        if constexpr (sizeof(Header) == 2) store_bytes(record, header, 2);
        else store_value(record, header);
    }
    __device__ __forceinline__ static Header load_header(const uint8_t* record) {
        if constexpr (sizeof(Header) == 2) return static_cast<Header>(load_bytes(record, 2));
        else return load_value<Header>(record);
    }
    template <class Use>
    __device__ __forceinline__ void with_encoder(Header header, Use use) const {
        if (codec.has_codes(header)) codec.with_encoder(header, use);
        else use(NoCode());
    }
    template <class Use>
    __device__ __forceinline__ void with_decoder(Header header, Use use) const {
        if (codec.has_codes(header)) codec.with_decoder(header, use);
        else use(OneValue<Value>{codec.only_value(header)});
    }

    // One byte per code, zeros beyond `at.count`.
    template <class T>
    __device__ __forceinline__ uint64_t codes(const Header& header, const T (&x)[8], const Values& at) const {
        const Code& code = static_cast<const Code&>(*this);
        uint64_t codes = 0;
        code.with_encoder(header, [&](auto encoder) {
            if constexpr (Code::with_random) {
                const auto random = code.random_at(at.i);
                COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) {
                    const auto own = static_cast<uint16_t>(random.words[k / 2] >> k % 2 * 16);
                    codes |= uint64_t(k < at.count ? encoder.code(x[k], own) : 0) << 8 * k;
                }
            } else {
                COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) codes |= uint64_t(k < at.count ? encoder.code(x[k]) : 0) << 8 * k;
            }
        });
        return codes;
    }

    template <class T>
    __device__ __forceinline__ void values(const Header& header, uint64_t codes, T (&x)[8]) const {
        static_cast<const Code&>(*this).with_decoder(header, [&](auto decoder) {
            COMPCOLL_UNROLL for (int k = 0; k < 8; ++k) x[k] = decoder.value(code_in(codes, k));
        });
    }

    template <class T>
    __device__ __forceinline__ void decode(const uint8_t* wire, const Values& at, T (&x)[many]) const {
        const Code& code = static_cast<const Code&>(*this);
        int eight;
        const uint8_t* record = wire + layout.record_of(at.i, eight);
        const auto header = code.load_header(record);
        values(header, layout.load_codes(record, eight, at.count), x);
    }
};

// ---- the loop ---------------------------------------------------------------------------------------------------------------

constexpr int survey_pass = 0, sums_pass = 1, code_pass = 2;

template <bool plain, class Code>
__device__ __forceinline__ void encode_block(const Parameters& p, const Code& code, Team& team, int64_t b) {
    using T = typename Code::Value;
    using Signed = typename Code::Signed;
    const int block = code.layout.block;
    const int64_t begin = b * block;
    const int length = p.n - begin < block ? static_cast<int>(p.n - begin) : block;
    const int eights = (length + 7) / 8;
    const bool read_again = eights > team.size;
    uint8_t* record = p.out + code.layout.record(b);
    T x[8];
    Signed maxima[Code::maxima_count];
    COMPCOLL_UNROLL for (int k = 0; k < Code::maxima_count; ++k) maxima[k] = Code::least;
    int64_t sums[Code::sums_count] = {};
    typename Code::Header header{};
    const auto run = [&](int pass) {
        if (pass == sums_pass && !code.needs_sums(maxima)) return;  // uniform over the team
        COMPCOLL_ROLLED for (int eight = team.rank; eight < eights; eight += team.size) {
            const Values at{begin + 8 * eight, length - 8 * eight < 8 ? length - 8 * eight : 8};
            if (pass == survey_pass || read_again) wanted<plain>(p, code, at, x);
            if (pass == survey_pass) {
                code.survey(x, at.count, maxima);
            } else if (pass == sums_pass) {
                code.add_up(x, maxima, sums);
            } else {
                const uint64_t codes = code.codes(header, x, at);
                code.layout.store_codes(record, eight, at.count, codes);
                if constexpr (!plain) {
                    if (p.residual == nullptr && p.decoded == nullptr) continue;
                    T got[8];
                    code.values(header, codes, got);
                    conclude(p, at, x, got);
                }
            }
        }
        if (pass == survey_pass) team.reduce(maxima, Larger());
        if (pass == sums_pass) team.reduce(sums, Sum());
        if (pass != code_pass) header = code.header(maxima, sums, length);
    };
    if constexpr (plain) {
        run(survey_pass);
        run(sums_pass);
        run(code_pass);
    } else {  // instantiates `wanted`, by far the largest part of such a kernel, once
        COMPCOLL_ROLLED for (int pass = survey_pass; pass <= code_pass; ++pass) run(pass);
    }
    if (team.rank == 0) code.store_header(record, header);
}

// Encode the blocks from b on and before `end`.
template <bool plain, class Code>
__device__ __forceinline__ void encode_by_warp(const Parameters& p, const Code& code, int64_t b, int64_t end) {
    Team warp(5);
    COMPCOLL_ROLLED for (; b < end; ++b) encode_block<plain>(p, code, warp, b);
}

template <bool plain, class Code>
__device__ __forceinline__ void encode_blocks(const Parameters& p, const Code& code) {
    Team team(p.team);
    for (int64_t b = team.index(); b < p.blocks; b += team.count()) encode_block<plain>(p, code, team, b);
}

}  // namespace compcoll
