#include "low_rank_tiles.h"

const compcoll::LowRankPasses compcoll::low_rank_portable = compcoll::these_low_rank;
