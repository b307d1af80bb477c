#include "low_rank_tiles.h"

const compcoll::LowRankPasses compcoll::low_rank_avx2 = compcoll::these_low_rank;
