#include "qsgd_tiles.h"

const compcoll::Kernels compcoll::qsgd_portable = compcoll::these_kernels;
