#include "sparse_tiles.h"

const compcoll::Passes compcoll::passes_avx512 = compcoll::these_passes;
