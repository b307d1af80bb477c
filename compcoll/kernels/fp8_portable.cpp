#include "fp8_tiles.h"

const compcoll::Kernels compcoll::fp8_portable = compcoll::these_kernels;
