#include "cast_tiles.h"

const compcoll::Kernels compcoll::cast_avx2 = compcoll::these_kernels;
