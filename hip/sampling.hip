// The sampling kernel for AMD GPUs: cuda/sampling.cu in HIP's words.
#include "compat.h"

#include "../cuda/sampling.cu"
