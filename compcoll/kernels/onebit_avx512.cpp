#include "onebit_tiles.h"

const compcoll::Kernels compcoll::onebit_avx512 = compcoll::these_kernels;
