// The kernel of cuda/state.cu for AMD GPUs, in HIP's words.
#include "compat.h"

#include "../cuda/state.cu"
