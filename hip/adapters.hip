// The kernels of cuda/linear/adapters.cu for AMD GPUs, in HIP's words.
#include "compat.h"

#include "../cuda/linear/adapters.cu"
