/* All kernels for one instruction set: one translation unit, so that small functions are inlined everywhere. */

#include "int8.c"
#include "norms.c"
#include "activations.c"
#include "kv_store.c"
#include "attention.c"
#include "sampling.c"
#include "program.c"

/* What Python must know of the set. */
__attribute__((visibility("default"))) const int64_t block_outputs = BLOCK, zero_point = ZERO_POINT, inverts = INVERTS;
