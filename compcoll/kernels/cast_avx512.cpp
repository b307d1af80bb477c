#include "cast_tiles.h"

const compcoll::Kernels compcoll::cast_avx512 = compcoll::these_kernels;
