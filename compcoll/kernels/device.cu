// The CUDA program, with three kernels for each codec and computing type:
//
//   encode   an array without further terms
//   recode   any sum of terms, with or without a residual and the decoded result
//   decode   any sum of terms
//
// COMPCOLL_FIRST etc. (of `Parameters`), COMPCOLL_BITS (of a code) and COMPCOLL_STORAGE (of arrays) make it the program of one
// configuration, in which a warp has its values in registers. COMPCOLL_CAST, COMPCOLL_ZFP, COMPCOLL_INTEGER_QUANTIZER,
// COMPCOLL_SPARSE, COMPCOLL_SZP and COMPCOLL_BLOCKS=NAME (a codec of codecs.h) select a part of it; without any of these, all is compiled.
// COMPCOLL_TYPES is a mask of computing types: 1 for float, 2 for double.
#include "device_codecs.h"
#include "device_sparse.h"
#include "device_integer_quantizer.h"
#include "device_szp.h"
#include "device_warps.h"
#include "device_zfp.h"

#if !defined(COMPCOLL_CAST) && !defined(COMPCOLL_ZFP) && !defined(COMPCOLL_INTEGER_QUANTIZER) && !defined(COMPCOLL_SPARSE) && \
    !defined(COMPCOLL_SZP) && !defined(COMPCOLL_BLOCKS)
#define COMPCOLL_CAST
#define COMPCOLL_ZFP
#define COMPCOLL_INTEGER_QUANTIZER
#define COMPCOLL_SPARSE
#define COMPCOLL_SZP
#define COMPCOLL_ALL_BLOCKS
#endif
#if !defined(COMPCOLL_TYPES)
#define COMPCOLL_TYPES 3
#endif

namespace compcoll {

template <class T>
struct CastCode {
    using Value = T;
    static constexpr int many = 8;
    int storage;

    __device__ __forceinline__ explicit CastCode(const Parameters& p) : storage(first_of(p)) {}

    __device__ __forceinline__ void decode(const uint8_t* wire, const Values& at, T (&x)[many]) const { at.load(wire, storage, x); }
};

#if defined(COMPCOLL_FIRST)
// A warp processes a tile of `cast_rounds` rounds (device_warps.h).
constexpr int cast_rounds = 8;

template <bool plain, class T>
__device__ __forceinline__ void sum_cast(const Parameters& p, int64_t begin, T (&x)[cast_rounds][4]) {
    if (plain || p.add != nullptr) {
        const RoundsOf<T> add(p.add, add_storage_of(p), begin);
        COMPCOLL_UNROLL for (int r = 0; r < cast_rounds; ++r) add.load(r, x[r]);
    } else {  // copied rather than added, so that a NaN keeps its payload
        const RoundsOf<T> wire(p.wires[0], first_of(p), begin);
        COMPCOLL_UNROLL for (int r = 0; r < cast_rounds; ++r) wire.load(r, x[r]);
    }
    if constexpr (plain) return;
    if (p.add != nullptr) {
        COMPCOLL_UNROLL for (int r = 0; r < cast_rounds; ++r) multiply(p, x[r]);
    }
    COMPCOLL_ROLLED for (int w = p.add == nullptr; w < p.wire_count; ++w) {
        const RoundsOf<T> wire(p.wires[w], first_of(p), begin);
        COMPCOLL_UNROLL for (int r = 0; r < cast_rounds; ++r) {
            T term[4];
            wire.load(r, term);
            compcoll::add(x[r], term);
        }
    }
}

// Call work(begin) for whole tiles, and rest(values) for at most eight values each after them.
template <class Work, class Rest>
__device__ __forceinline__ void for_cast_tiles(const Parameters& p, const Work& work, const Rest& rest) {
    constexpr int64_t tile = cast_rounds * round_values;
    for (int64_t begin = first_thread() / warp_threads * tile; begin < p.n; begin += all_threads() / warp_threads * tile) {
        if (begin + tile <= p.n) {
            work(begin);
        } else {
            COMPCOLL_ROLLED for (int64_t i = begin + 8 * lane_of_warp(); i < p.n; i += 8 * warp_threads)
                rest(Values{i, p.n - i < 8 ? static_cast<int>(p.n - i) : 8});
        }
    }
}
#endif

template <bool plain, class T>
__device__ __forceinline__ void encode_eight(const Parameters& p, const CastCode<T>& code, const Values& at) {
    constexpr int many = CastCode<T>::many;
    T x[many];
    wanted<plain>(p, code, at, x);
    at.store(p.out, code.storage, x);
    if constexpr (!plain) {
        if (p.residual == nullptr && p.decoded == nullptr) return;
        T got[many];
        code.decode(p.out, at, got);  // this thread has just written it
        conclude(p, at, x, got);
    }
}

template <bool plain, class T>
__device__ __forceinline__ void encode_cast(const Parameters& p, const CastCode<T>& code) {
#if defined(COMPCOLL_FIRST)
    for_cast_tiles(
        p,
        [&](int64_t begin) {
            T x[cast_rounds][4];
            sum_cast<plain>(p, begin, x);
            const RoundsOf<T> out(p.out, first_of(p), begin), residual(p.residual, computed_storage<T>, begin);
            if (!plain && p.residual != nullptr && p.feed) {
                COMPCOLL_UNROLL for (int r = 0; r < cast_rounds; ++r) add_loaded(RoundOf<T>{residual, r}, x[r]);
            }
            COMPCOLL_UNROLL for (int r = 0; r < cast_rounds; ++r) out.store(r, x[r]);
            if (plain || (p.residual == nullptr && p.decoded == nullptr)) return;
            const RoundsOf<T> decoded(p.decoded, out_storage_of(p), begin);
            COMPCOLL_UNROLL for (int r = 0; r < cast_rounds; ++r) {
                T got[4];
                out.rounded(x[r], got);
                conclude(p, RoundOf<T>{residual, r}, RoundOf<T>{decoded, r}, x[r], got);
            }
        },
        [&](const Values& at) { encode_eight<plain>(p, code, at); });
#else
    for_values<CastCode<T>::many>(p.n, [&](const Values& at) { encode_eight<plain>(p, code, at); });
#endif
}

template <class T>
__device__ __forceinline__ void decode_cast(const Parameters& p, const CastCode<T>& code) {
#if defined(COMPCOLL_FIRST)
    for_cast_tiles(
        p,
        [&](int64_t begin) {
            T x[cast_rounds][4];
            sum_cast<false>(p, begin, x);
            const RoundsOf<T> out(p.out, out_storage_of(p), begin);
            COMPCOLL_UNROLL for (int r = 0; r < cast_rounds; ++r) out.store(r, x[r]);
        },
        [&](const Values& at) { decode_values(p, code, at); });
#else
    decode_all(p, code);
#endif
}

}  // namespace compcoll

using compcoll::Parameters;
using compcoll::zfp::table_entries;

#define COMPCOLL_KERNEL extern "C" __global__ void __launch_bounds__(256)
#define COMPCOLL_LARGE_KERNEL extern "C" __global__ void __launch_bounds__(256, 1)  // more registers per thread, at the cost of occupancy

#if defined(COMPCOLL_FIRST)
#define COMPCOLL_TILE_KERNEL extern "C" __global__ void __launch_bounds__(128, 2)  // a tile's values are in registers
#endif

#define COMPCOLL_CAST_KERNELS(type, T)                                                                                        \
    COMPCOLL_KERNEL encode_cast_##type(const Parameters p) {                                                                  \
        compcoll::encode_cast<true>(p, compcoll::CastCode<T>(p));                                                             \
    }                                                                                                                         \
    COMPCOLL_LARGE_KERNEL recode_cast_##type(const Parameters p) {                                                            \
        compcoll::encode_cast<false>(p, compcoll::CastCode<T>(p));                                                            \
    }                                                                                                                         \
    COMPCOLL_KERNEL decode_cast_##type(const Parameters p) {                                                                  \
        compcoll::decode_cast(p, compcoll::CastCode<T>(p));                                                                   \
    }

#if defined(COMPCOLL_FIRST)
#define COMPCOLL_BLOCK_KERNELS(codec, Code, type, T)                                                                          \
    COMPCOLL_TILE_KERNEL encode_##codec##_##type(const Parameters p) {                                                            \
        compcoll::encode_tiles<true, COMPCOLL_BITS, COMPCOLL_SECOND>(p, compcoll::Code<T>(p));                                \
    }                                                                                                                         \
    COMPCOLL_TILE_KERNEL recode_##codec##_##type(const Parameters p) {                                                            \
        compcoll::encode_tiles<false, COMPCOLL_BITS, COMPCOLL_SECOND>(p, compcoll::Code<T>(p));                               \
    }                                                                                                                         \
    COMPCOLL_TILE_KERNEL decode_##codec##_##type(const Parameters p) {                                                            \
        compcoll::decode_tiles<COMPCOLL_BITS, COMPCOLL_SECOND>(p, compcoll::Code<T>(p));                                      \
    }
#else
#define COMPCOLL_BLOCK_KERNELS(codec, Code, type, T)                                                                          \
    COMPCOLL_KERNEL encode_##codec##_##type(const Parameters p) { compcoll::encode_blocks<true>(p, compcoll::Code<T>(p)); }  \
    COMPCOLL_LARGE_KERNEL recode_##codec##_##type(const Parameters p) { compcoll::encode_blocks<false>(p, compcoll::Code<T>(p)); } \
    COMPCOLL_KERNEL decode_##codec##_##type(const Parameters p) { compcoll::decode_all(p, compcoll::Code<T>(p)); }
#endif

#define COMPCOLL_ZFP_KERNELS(codec, type, T, W, half)                                                                         \
    COMPCOLL_KERNEL encode_##codec##_##type(const Parameters p) {                                                            \
        __shared__ uint32_t encode_table[table_entries];                                                                      \
        compcoll::copy_table(compcoll::encode_table_source, encode_table);                                                    \
        compcoll::encode_zfp<true>(p, compcoll::ZFPCode<T, W, half>(p, encode_table), encode_table);                          \
    }                                                                                                                         \
    COMPCOLL_LARGE_KERNEL recode_##codec##_##type(const Parameters p) {                                                      \
        __shared__ uint32_t encode_table[table_entries], decode_table[table_entries];                                         \
        compcoll::copy_table(compcoll::encode_table_source, encode_table);                                                    \
        compcoll::copy_table(compcoll::decode_table_source, decode_table);                                                    \
        compcoll::encode_zfp<false>(p, compcoll::ZFPCode<T, W, half>(p, decode_table), encode_table);                         \
    }                                                                                                                         \
    COMPCOLL_LARGE_KERNEL decode_##codec##_##type(const Parameters p) {                                                      \
        __shared__ uint32_t decode_table[table_entries];                                                                      \
        compcoll::copy_table(compcoll::decode_table_source, decode_table);                                                    \
        compcoll::decode_zfp(p, compcoll::ZFPCode<T, W, half>(p, decode_table));                                              \
    }

#if COMPCOLL_TYPES & 1
#define COMPCOLL_FLOAT(...) __VA_ARGS__
#else
#define COMPCOLL_FLOAT(...)
#endif
#if COMPCOLL_TYPES & 2
#define COMPCOLL_DOUBLE(...) __VA_ARGS__
#else
#define COMPCOLL_DOUBLE(...)
#endif

#if defined(COMPCOLL_CAST)
COMPCOLL_FLOAT(COMPCOLL_CAST_KERNELS(float32, float))
COMPCOLL_DOUBLE(COMPCOLL_CAST_KERNELS(float64, double))
#endif

#if defined(COMPCOLL_ZFP)
COMPCOLL_FLOAT(COMPCOLL_ZFP_KERNELS(zfp32, float32, float, 1, true))
COMPCOLL_FLOAT(COMPCOLL_ZFP_KERNELS(zfp64, float32, float, 1, false))
COMPCOLL_FLOAT(COMPCOLL_ZFP_KERNELS(zfp128, float32, float, 2, false))
COMPCOLL_DOUBLE(COMPCOLL_ZFP_KERNELS(zfp32, float64, double, 1, true))
COMPCOLL_DOUBLE(COMPCOLL_ZFP_KERNELS(zfp64, float64, double, 1, false))
COMPCOLL_DOUBLE(COMPCOLL_ZFP_KERNELS(zfp256, float64, double, 4, false))
#endif

#define COMPCOLL_BLOCK_KERNELS_OF(codec, ...)                                      \
    COMPCOLL_FLOAT(COMPCOLL_BLOCK_KERNELS(codec, codec##_code, float32, float))    \
    COMPCOLL_DOUBLE(COMPCOLL_BLOCK_KERNELS(codec, codec##_code, float64, double))
#define COMPCOLL_BLOCK_KERNELS_OF_THE(codec) COMPCOLL_BLOCK_KERNELS_OF(codec)  // expands the macro in the argument

#if defined(COMPCOLL_ALL_BLOCKS)
COMPCOLL_EACH_BLOCK_CODEC(COMPCOLL_BLOCK_KERNELS_OF)
#elif defined(COMPCOLL_BLOCKS)
COMPCOLL_BLOCK_KERNELS_OF_THE(COMPCOLL_BLOCKS)
#endif

#define COMPCOLL_INTEGER_QUANTIZER_KERNELS(type, T)                                                                                     \
    COMPCOLL_KERNEL survey_blocks_##type(const Parameters p) { compcoll::survey_blocks<T>(p); }                              \
    COMPCOLL_KERNEL encode_integers_##type(const Parameters p) {                                                             \
        if (p.variant == 1) return compcoll::encode_integers<T, uint8_t>(p);                                                  \
        if (p.variant == 2) return compcoll::encode_integers<T, uint16_t>(p);                                                 \
        compcoll::encode_integers<T, uint32_t>(p);                                                                            \
    }                                                                                                                         \
    COMPCOLL_KERNEL decode_integers_##type(const Parameters p) {                                                             \
        if (p.variant == 1) return compcoll::decode_integers<T, uint8_t, signed char>(p);                                     \
        if (p.variant == 2) return compcoll::decode_integers<T, uint16_t, int16_t>(p);                                        \
        compcoll::decode_integers<T, uint32_t, int32_t>(p);                                                                   \
    }                                                                                                                         \
    COMPCOLL_KERNEL encode_votes_##type(const Parameters p) { compcoll::encode_votes<T>(p); }                                \
    COMPCOLL_KERNEL decode_votes_##type(const Parameters p) { compcoll::decode_votes<T>(p); }                                \
    COMPCOLL_KERNEL combine_numbers_##type(const Parameters p) { compcoll::combine_numbers(p); }

#if defined(COMPCOLL_INTEGER_QUANTIZER)
COMPCOLL_FLOAT(COMPCOLL_INTEGER_QUANTIZER_KERNELS(float32, float))
COMPCOLL_DOUBLE(COMPCOLL_INTEGER_QUANTIZER_KERNELS(float64, double))
#endif

#define COMPCOLL_SPARSE_KERNELS(type, T)                                                                                      \
    COMPCOLL_KERNEL moments_sparse_##type(const Parameters p) { compcoll::add_up_lanes<T>(p); }                              \
    COMPCOLL_KERNEL sample_sparse_##type(const Parameters p) { compcoll::sample_elements<T>(p); }                            \
    COMPCOLL_KERNEL count_sparse_##type(const Parameters p) { compcoll::count_elements<T>(p); }                              \
    COMPCOLL_KERNEL place_sparse_##type(const Parameters p) { compcoll::place_tiles(p); }                                    \
    COMPCOLL_KERNEL compact_sparse_##type(const Parameters p) { compcoll::compact_elements(p); }                          \
    COMPCOLL_KERNEL take_sparse_##type(const Parameters p) { compcoll::take_elements<T>(p); }                                \
    COMPCOLL_KERNEL put_sparse_##type(const Parameters p) { compcoll::put_elements<T>(p); }                                  \
    COMPCOLL_KERNEL add_sparse_##type(const Parameters p) { compcoll::add_elements<T>(p); }                                  \
    COMPCOLL_KERNEL subtract_sparse_##type(const Parameters p) { compcoll::subtract_elements<T>(p); }

#if defined(COMPCOLL_SPARSE)
COMPCOLL_FLOAT(COMPCOLL_SPARSE_KERNELS(float32, float))
COMPCOLL_DOUBLE(COMPCOLL_SPARSE_KERNELS(float64, double))
#endif

#define COMPCOLL_SZP_BLOCKS_KERNEL(T) extern "C" __global__ void __launch_bounds__(64, 32 / sizeof(T))  // a block's values are in registers
#define COMPCOLL_SZP_KERNELS(type, T)                                                                                         \
    COMPCOLL_KERNEL place_szp_##type(const Parameters p) { compcoll::place_blocks<T>(p); }                                   \
    COMPCOLL_SZP_BLOCKS_KERNEL(T) encode_szp_##type(const Parameters p) { compcoll::encode_szp<T>(p); }                      \
    COMPCOLL_KERNEL move_szp_##type(const Parameters p) { compcoll::move_blocks<T>(p); }                                     \
    COMPCOLL_SZP_BLOCKS_KERNEL(T) decode_szp_##type(const Parameters p) { compcoll::decode_szp<T>(p); }                      \
    COMPCOLL_KERNEL largest_szp_##type(const Parameters p) { compcoll::find_largest<T>(p); }

#if defined(COMPCOLL_SZP)
COMPCOLL_FLOAT(COMPCOLL_SZP_KERNELS(float32, float))
COMPCOLL_DOUBLE(COMPCOLL_SZP_KERNELS(float64, double))
#endif
