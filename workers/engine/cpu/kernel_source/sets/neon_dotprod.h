/* NEON with dot products (ARMv8.2): `sdot` sums four products of signed bytes, in registers of 16 bytes. */

#pragma once
#include <arm_neon.h>

#define DOT_LANES 4  /* int32 of a register */
#define BLOCK 16     /* outputs whose sums for DOT_ROWS rows the registers hold */
#define ZERO_POINT 0 /* of x */
#define INVERTS 0
#define SUM_VECTORS 6 /* `floats` that the registers hold, with room for what is added to them */

typedef int32x4_t dot_sums;
typedef int8x16_t dot_inputs, dot_weights;

INLINE dot_inputs spread(const uint8_t *four) {
    int32_t inputs;
    __builtin_memcpy(&inputs, four, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(inputs));
}

INLINE dot_weights load_weights(const int8_t *from) { return vld1q_s8(from); }

INLINE dot_sums dot(dot_sums sums, dot_inputs x, dot_weights weights) { return vdotq_s32(sums, weights, x); }
