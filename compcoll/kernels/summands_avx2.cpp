#include "summand_tiles.h"

const compcoll::SummandPasses compcoll::summands_avx2 = compcoll::these_summands;
