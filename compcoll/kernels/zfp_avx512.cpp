// ZFP tiles for AVX-512 (F, BW, CD, DQ, VL) with VBMI and GFNI.
#include "zfp_lanes.h"

namespace compcoll {

const Kernels zfp_avx512 = {{encode<float>, decode<float>, decode_add<float>},
                            {encode<double>, decode<double>, decode_add<double>}};

}  // namespace compcoll
