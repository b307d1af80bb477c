#include "summand_tiles.h"

const compcoll::SummandPasses compcoll::summands_avx512 = compcoll::these_summands;
