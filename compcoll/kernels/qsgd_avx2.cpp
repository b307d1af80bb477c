#include "qsgd_tiles.h"

const compcoll::Kernels compcoll::qsgd_avx2 = compcoll::these_kernels;
