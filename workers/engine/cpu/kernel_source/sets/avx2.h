/* AVX2 (x86-64-v3): four products are summed by three instructions.

   `vpmaddubsw` multiplies unsigned by signed bytes and adds pairs in 16 bits, where 2 · 127 · 128 = 32,512 fits: so the
   sign of a weight is moved to the input, which is inverted. A weight is at least −127. `vpsignb` would negate it, on
   the ports that multiply (docs/PERFORMANCE.md). */

#pragma once
#include <immintrin.h>

#define DOT_LANES 8   /* int32 of a register */
#define BLOCK 16      /* outputs whose sums for DOT_ROWS rows the registers hold */
#define ZERO_POINT 0  /* of x */
#define INVERTS 1     /* x where a weight is negative: −x − 1 */
#define SUM_VECTORS 6 /* `floats` that the registers hold, with room for what is added to them */

typedef __m256i dot_sums, dot_inputs;
typedef struct {
    __m256i are_negative, magnitudes;
} dot_weights;

INLINE dot_inputs spread(const uint8_t *four) {
    int32_t inputs;
    __builtin_memcpy(&inputs, four, 4);
    return _mm256_set1_epi32(inputs);
}

INLINE dot_weights load_weights(const int8_t *from) {
    __m256i weights = _mm256_loadu_si256((const __m256i *)from);
    return (dot_weights){_mm256_cmpgt_epi8(_mm256_setzero_si256(), weights), _mm256_abs_epi8(weights)};
}

INLINE dot_sums dot(dot_sums sums, dot_inputs x, dot_weights weights) {
    __m256i pairs = _mm256_maddubs_epi16(weights.magnitudes, _mm256_xor_si256(x, weights.are_negative));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
