#include "summand_tiles.h"

const compcoll::SummandPasses compcoll::summands_portable = compcoll::these_summands;
