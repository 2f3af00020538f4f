/* Any CPU: C without instructions for dot products. Slow, and the same bits. */

#pragma once

#define DOT_LANES 16 /* int32 of a register */
#define BLOCK 16     /* outputs whose sums for DOT_ROWS rows the registers hold */
#define ZERO_POINT 0 /* of x */
#define INVERTS 0
#define SUM_VECTORS 2 /* `floats` that the registers hold, with room for what is added to them */

typedef ints dot_sums, dot_inputs, dot_weights;

INLINE dot_inputs spread(const uint8_t *four) {
    int32_t inputs;
    __builtin_memcpy(&inputs, four, 4);
    return inputs;
}

INLINE dot_weights load_weights(const int8_t *from) {
    ints weights;
    __builtin_memcpy(&weights, from, sizeof weights);
    return weights;
}

/* Shifting left and right again extends the sign of each byte of a lane. */
INLINE dot_sums dot(dot_sums sums, dot_inputs x, dot_weights weights) {
    for (int shift = 24; shift >= 0; shift -= 8) sums += (x << shift >> 24) * (weights << shift >> 24);
    return sums;
}
