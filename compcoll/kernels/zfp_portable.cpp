// ZFP tiles for any processor.
#include "zfp_lanes.h"

namespace compcoll {

const Kernels zfp_portable = {{encode<float>, decode<float>, decode_add<float>},
                              {encode<double>, decode<double>, decode_add<double>}};

}  // namespace compcoll
