#include "minmax_tiles.h"

const compcoll::Kernels compcoll::minmax_avx2 = compcoll::these_kernels;
