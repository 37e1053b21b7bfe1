// The kernels of cuda/mix.cu for AMD GPUs, in HIP's words.
#include "compat.h"

#include "../cuda/mix.cu"
