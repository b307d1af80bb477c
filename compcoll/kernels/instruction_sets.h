// The instruction sets, a check whether this CPU supports them, and the functions for each.
#pragma once

#include <stdexcept>

#include "integer_quantizer_passes.h"
#include "low_rank_passes.h"
#include "sparse_passes.h"
#include "szp_passes.h"
#include "tile.h"

namespace compcoll {

enum class InstructionSet : int { portable = 0, avx2 = 1, avx512 = 2 };

struct NamedSet {
    const char* name;
    InstructionSet set;
};

inline constexpr NamedSet all_sets[] = {
    {"portable", InstructionSet::portable}, {"avx2", InstructionSet::avx2}, {"avx512", InstructionSet::avx512}};

inline bool supported([[maybe_unused]] InstructionSet set) {
    if (set == InstructionSet::portable) return true;
#if defined(COMPCOLL_X86)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    if (set == InstructionSet::avx2) return avx2;
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni");
#else
    return false;
#endif
}

inline InstructionSet checked_set(int index) {
    const auto set = static_cast<InstructionSet>(index);
    if (index < 0 || index > 2 || !supported(set)) throw std::invalid_argument("this CPU lacks the instruction set asked for");
    return set;
}

#if defined(COMPCOLL_X86)
#define COMPCOLL_SETS(name) {&name##_portable, &name##_avx2, &name##_avx512}
#else
#define COMPCOLL_SETS(name) {&name##_portable, &name##_portable, &name##_portable}
#endif

inline const Kernels& kernels_of(Codec codec, InstructionSet set) {
#define COMPCOLL_ROW(codec, ...) COMPCOLL_SETS(codec),
    static const Kernels* const table[][3] = {COMPCOLL_EACH_CODEC(COMPCOLL_ROW)};
#undef COMPCOLL_ROW
    return *table[static_cast<int>(codec)][static_cast<int>(set)];
}

inline const Sums& sums_of(InstructionSet set) {
    static const Sums* const table[3] = COMPCOLL_SETS(sums);
    return *table[static_cast<int>(set)];
}

inline const IntegerQuantizerPasses& integer_quantizer_of(InstructionSet set) {
    static const IntegerQuantizerPasses* const table[3] = COMPCOLL_SETS(integer_quantizer);
    return *table[static_cast<int>(set)];
}

inline const LowRankPasses& low_rank_of(InstructionSet set) {
    static const LowRankPasses* const table[3] = COMPCOLL_SETS(low_rank);
    return *table[static_cast<int>(set)];
}

inline const SparsePasses& sparse_of(InstructionSet set) {
    static const SparsePasses* const table[3] = COMPCOLL_SETS(sparse);
    return *table[static_cast<int>(set)];
}

inline const SzpPasses& szp_of(InstructionSet set) {
    static const SzpPasses* const table[3] = COMPCOLL_SETS(szp);
    return *table[static_cast<int>(set)];
}

#undef COMPCOLL_SETS

}  // namespace compcoll
