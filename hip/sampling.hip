// The sampling kernel of cuda/sampling.cu for AMD GPUs, in HIP's words: a block for each row.
#include "compat.h"

#include "../cuda/sampling.cu"
