#include "cast_tiles.h"

const compcoll::Kernels compcoll::cast_portable = compcoll::these_kernels;
