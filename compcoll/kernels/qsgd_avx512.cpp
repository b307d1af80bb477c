#include "qsgd_tiles.h"

const compcoll::Kernels compcoll::qsgd_avx512 = compcoll::these_kernels;
