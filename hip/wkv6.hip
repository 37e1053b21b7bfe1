// The kernels of cuda/wkv/wkv6.cu for AMD GPUs, in HIP's words.
#include "compat.h"

#include "../cuda/wkv/wkv6.cu"
