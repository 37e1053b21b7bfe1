// A source that takes long to compile is compiled in parts, side by side. A line "// parts: N" at its top says in how many;
// COMPILED_PART is the number of this one, and part 0 has the C functions. Where it is not defined, all is in one.
#pragma once

#ifdef COMPILED_PART
#define IN_PART(number) (COMPILED_PART == (number))
#pragma nv_diag_suppress 177  // what only other parts use
#else
#define IN_PART(number) 1
#endif
