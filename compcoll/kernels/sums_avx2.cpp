#include "sums.h"

const compcoll::Sums compcoll::sums_avx2 = compcoll::these_sums;
