// The kernels of cuda/linear/dequantise.cu for AMD GPUs, in HIP's words.
#include "compat.h"

#include "../cuda/linear/dequantise.cu"
