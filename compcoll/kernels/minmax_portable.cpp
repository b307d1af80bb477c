#include "minmax_tiles.h"

const compcoll::Kernels compcoll::minmax_portable = compcoll::these_kernels;
