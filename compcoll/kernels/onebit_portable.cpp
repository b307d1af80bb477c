#include "onebit_tiles.h"

const compcoll::Kernels compcoll::onebit_portable = compcoll::these_kernels;
