/* AVX-VNNI, with AVX2: `vpdpbusd` sums four products of unsigned by signed bytes, in registers of 32 bytes. */

#pragma once
#include <immintrin.h>

#define DOT_LANES 8    /* int32 of a register */
#define BLOCK 16       /* outputs whose sums for DOT_ROWS rows the registers hold */
#define ZERO_POINT 128 /* of x */
#define INVERTS 0
#define SUM_VECTORS 6 /* `floats` that the registers hold, with room for what is added to them */

typedef __m256i dot_sums, dot_inputs, dot_weights;

INLINE dot_inputs spread(const uint8_t *four) {
    int32_t inputs;
    __builtin_memcpy(&inputs, four, 4);
    return _mm256_set1_epi32(inputs);
}

INLINE dot_weights load_weights(const int8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }

INLINE dot_sums dot(dot_sums sums, dot_inputs x, dot_weights weights) {
    return _mm256_dpbusd_avx_epi32(sums, x, weights);
}
