#include "fp8_tiles.h"

const compcoll::Kernels compcoll::fp8_avx2 = compcoll::these_kernels;
