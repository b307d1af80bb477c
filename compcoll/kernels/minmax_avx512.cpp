#include "minmax_tiles.h"

const compcoll::Kernels compcoll::minmax_avx512 = compcoll::these_kernels;
