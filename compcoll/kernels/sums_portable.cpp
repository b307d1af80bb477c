#include "sums.h"

const compcoll::Sums compcoll::sums_portable = compcoll::these_sums;
