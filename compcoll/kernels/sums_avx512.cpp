#include "sums.h"

const compcoll::Sums compcoll::sums_avx512 = compcoll::these_sums;
