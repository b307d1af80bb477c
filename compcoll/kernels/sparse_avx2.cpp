#include "sparse_tiles.h"

const compcoll::Passes compcoll::passes_avx2 = compcoll::these_passes;
