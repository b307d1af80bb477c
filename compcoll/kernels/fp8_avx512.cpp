#include "fp8_tiles.h"

const compcoll::Kernels compcoll::fp8_avx512 = compcoll::these_kernels;
