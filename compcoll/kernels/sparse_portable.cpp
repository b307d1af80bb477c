#include "sparse_tiles.h"

const compcoll::Passes compcoll::passes_portable = compcoll::these_passes;
