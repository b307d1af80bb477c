#include "onebit_tiles.h"

const compcoll::Kernels compcoll::onebit_avx2 = compcoll::these_kernels;
