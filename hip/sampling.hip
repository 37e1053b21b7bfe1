// The sampling kernel for AMD GPUs: cuda/sampling.cu in HIP's words. It counts on warps of 32 lanes that may run apart, which
// a wavefront of 64 has to allow; it has been compiled only.
#include "compat.h"

#include "../cuda/sampling.cu"
