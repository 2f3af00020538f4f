/* The product of 8-bit activations and packed 8-bit weights.

   For x [rows, inputs] and W [outputs, inputs] int8:

       out[row, o] = float32(Σᵢ (x[row, i] − ZERO_POINT) · W[o, i]) · factors[o]

   Sums are int32 and exact, whatever their order; each output is rounded twice, to float32 and by the factor. Where an
   instruction set multiplies unsigned x, ZERO_POINT is 128, and a sum begins at starts[o] = −128 · Σᵢ W[o, i]. Where it
   INVERTS, it multiplies |W| by x, or by −x − 1 where W is negative, and a sum begins at minus the sum of these W.

   A set's header has: DOT_LANES sums of a register, BLOCK outputs that are computed together, so that their sums for
   DOT_ROWS rows fill the registers, and `dot`, which adds four products to each sum. A block's weights lie in the order
   in which they are read: memory is read in one stream.

   Weights are prefetched into L2. An Intel CPU prefetches by itself, but not across a page, and too late where a row's
   products leave it little to do. While a block is multiplied with a few rows, the next block is prefetched in
   PREFETCH_STREAMS places at once, which keeps more memory banks busy than one stream. AMD's prefetchers do better
   alone: on Zen 5 a step of three rows of GPT-2 small's shape takes 3.0 ms; with prefetching 3.2 ms in one stream,
   3.6 ms in eight. Where more than DOT_ROWS rows meet a block group after group, nothing of the next block would be read
   meanwhile: each group prefetches a part of it. */

#include "kernels.h"

#define COLUMNS (BLOCK / DOT_LANES)        /* registers of sums of a row */
#define ALL_LINES (4 * BLOCK / CACHE_LINE) /* cache lines of a block for each four inputs */
#define PREFETCH_STREAMS 8
#define AMX_PREFETCH_BYTES 8192 /* distance */

/* Where a block of outputs begins. */
typedef struct {
    const int8_t *weights;
    const int32_t *starts;
    const float *factors;
    int64_t num_left; /* outputs from the first of the block on */
} Block;

/* VECTOR outputs of a row, those from `first` on. */
INLINE void store_products(const Block *block, int first, const int32_t *sums, float *out) {
    ints totals;
    __builtin_memcpy(&totals, sums, sizeof totals);
    floats products = __builtin_convertvector(totals, floats) * load(block->factors + first);
    store_some(out + first, products, block->num_left - first);
}

/* The formula for 1 to DOT_ROWS rows and one block of outputs.

   num_rows, num_lines: constants; rows, and cache lines to prefetch from `ahead` for each four inputs.
   num_inputs, num_outputs: of the whole product, the strides of x and out. */
INLINE void dot_products(int num_rows, int num_lines, const Block *block, const uint8_t *x, int64_t num_inputs,
                         float *out, int64_t num_outputs, const char *ahead) {
    const int num_streams = num_lines == ALL_LINES ? PREFETCH_STREAMS : 1;
    /* For each four inputs, one line of some of the streams; the others follow in turn. */
    const int num_turns = num_streams > num_lines ? num_streams / (num_lines ? num_lines : 1) : 1;
    const int64_t stream_bytes = num_inputs * BLOCK / num_streams;
    dot_sums sums[DOT_ROWS][COLUMNS];
    UNROLLED(row, num_rows)
        UNROLLED(column, COLUMNS) {
            sums[row][column] = (dot_sums){0};
            if (ZERO_POINT || INVERTS)
                __builtin_memcpy(&sums[row][column], block->starts + DOT_LANES * column, sizeof sums[row][column]);
        }
    for (int64_t four = 0; four < num_inputs / 4; four++) {
        dot_weights weights[COLUMNS];
        UNROLLED(line, num_lines) {
            int64_t stream = four % num_turns * num_lines + line;
            __builtin_prefetch(ahead + stream * stream_bytes + four / num_turns * CACHE_LINE, 0, 2);
        }
        UNROLLED(column, COLUMNS)
            weights[column] = load_weights(block->weights + 4 * (four * BLOCK + DOT_LANES * column));
        UNROLLED(row, num_rows) {
            dot_inputs inputs = spread(x + row * num_inputs + 4 * four);
            UNROLLED(column, COLUMNS) sums[row][column] = dot(sums[row][column], inputs, weights[column]);
        }
    }
    UNROLLED(row, num_rows) {
        int32_t totals[BLOCK];
        __builtin_memcpy(totals, sums[row], sizeof totals);
        UNROLLED(v, BLOCK / VECTOR) store_products(block, VECTOR * v, totals + VECTOR * v, out + row * num_outputs);
    }
}

INLINE void dot_some(int64_t num_rows, int num_lines, const Block *block, const uint8_t *x, int64_t num_inputs,
                     float *out, int64_t num_outputs, const char *ahead) {
#define CASE(number)                                                                                                   \
    case number: dot_products(number, num_lines, block, x, num_inputs, out, num_outputs, ahead); break;
    switch (num_rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}

#ifdef __AMX_INT8__
#include "amx.h"
#endif

/* One block of outputs of all rows.

   following: the weights that are read after this block's. */
INLINE void multiply_block(const Call *call, const Product *product, int64_t number, const char *following) {
    const int64_t num_inputs = product->num_inputs, num_outputs = product->num_outputs;
    const int64_t first = number * BLOCK;
    const Block block = {
        (const int8_t *)product->weights_at + first * num_inputs,
        (const int32_t *)product->starts_at + first,
        (const float *)product->factors_at + first,
        num_outputs - first,
    };
    const uint8_t *x = (const uint8_t *)call->layer_at;
    float *out = (float *)call->product_at + first;
    int64_t left = call->num_rows;
#ifdef __AMX_INT8__
    if (left > product->max_dot_rows) {
        for (int64_t ahead = AMX_PREFETCH_BYTES; left > 0; left -= 2 * AMX_ROWS, ahead = 0) {
            amx_products(least(left, 2 * AMX_ROWS), &block, x, num_inputs, out, num_outputs, ahead);
            x += 2 * AMX_ROWS * num_inputs;
            out += 2 * AMX_ROWS * num_outputs;
        }
        return;
    }
#endif
    const char *end = following + BLOCK * num_inputs;
    const int lines_for_many = product->prefetches_all ? ALL_LINES : 1;
    for (; left > DOT_ROWS; left -= DOT_ROWS) {
        if (following >= end)
            dot_products(DOT_ROWS, 0, &block, x, num_inputs, out, num_outputs, following);
        else if (lines_for_many == 1)
            dot_products(DOT_ROWS, 1, &block, x, num_inputs, out, num_outputs, following);
        else
            dot_products(DOT_ROWS, ALL_LINES, &block, x, num_inputs, out, num_outputs, following);
        x += DOT_ROWS * num_inputs;
        out += DOT_ROWS * num_outputs;
        following += lines_for_many * CACHE_LINE * (num_inputs / 4); /* as far as it has prefetched */
    }
    if (product->prefetches_all)
        dot_some(left, ALL_LINES, &block, x, num_inputs, out, num_outputs, following);
    else
        dot_some(left, 0, &block, x, num_inputs, out, num_outputs, following);
}

/* out [rows, outputs] float32 by the formula; an item is a block of outputs.

   The call has a PRODUCT in `step_at`, x [rows, inputs] in `layer_at`, out in `product_at`. */
KERNEL(multiply) {
    const Product *product = (const Product *)call->step_at;
    const int64_t num_blocks = (product->num_outputs + BLOCK - 1) / BLOCK, block_bytes = BLOCK * product->num_inputs;
    const int64_t share = thread % call->num_shares;
    const int64_t last = num_blocks * (share + 1) / call->num_shares - 1;
    const char *weights = (const char *)product->weights_at, *after_last = weights + (last + 1) * block_bytes;
    if (product->next_at) {
        const Product *next = (const Product *)product->next_at;
        int64_t first = (next->num_outputs + BLOCK - 1) / BLOCK * share / call->num_shares;
        after_last = (const char *)next->weights_at + first * BLOCK * next->num_inputs;
    }
    FOR_ITEMS(number, num_blocks) {
        multiply_block(call, product, number, number == last ? after_last : weights + (number + 1) * block_bytes);
    }
#ifdef __AMX_INT8__
    if (call->num_rows > product->max_dot_rows) _tile_release(); /* the system need not save them any more */
#endif
}
