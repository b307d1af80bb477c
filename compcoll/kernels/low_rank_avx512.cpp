#include "low_rank_tiles.h"

const compcoll::LowRankPasses compcoll::low_rank_avx512 = compcoll::these_low_rank;
