// ZFP tiles for x86-64-v3: the same lanes, wider.
#include "zfp_lanes.h"

namespace compcoll {

const Kernels zfp_avx2 = {{encode<float>, decode<float>, decode_add<float>},
                          {encode<double>, decode<double>, decode_add<double>}};

}  // namespace compcoll
