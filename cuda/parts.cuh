// A source that takes long to compile is compiled in parts, side by side. A line "// parts: N" at its top says in how many;
// COMPILED_PART is the number of this one, and part 0 has the C functions. Where it is not defined, all is in one.
// A first start waits for its compiler. So where FP16_ALONE is defined, as for models that are not quantised, parts that a line
// "// left out with FP16_ALONE: N" names are not compiled.
#pragma once

#ifdef COMPILED_PART
#define IN_PART(number) (COMPILED_PART == (number))
#pragma nv_diag_suppress 177  // what only other parts use
#else
#define IN_PART(number) 1
#endif
