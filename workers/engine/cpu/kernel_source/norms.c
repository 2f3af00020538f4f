/* Residual additions with norms, quantization of rows, and scaling.

   A sum over a row's width runs in LANES chains: chain l adds the elements l, l + LANES, l + 2 · LANES and so on; then the
   chains are added in ascending order. The order depends on the width alone, so a row has the same bits in every
   batch. */

#include "kernels.h"

#define MIN_SCALE 1.1754944e-38f /* the smallest normal float32: a row of zeros is divided by it */

/* Σ row[i], or Σ row[i]² with fused products. */
INLINE float sum_row(const float *row, int64_t width, int is_squared) {
    float chains[LANES];
    floats sums[LANES / VECTOR] = {0};
    for (int64_t first = 0; first < width; first += LANES)
        UNROLLED(v, LANES / VECTOR) {
            int64_t left = width - first - VECTOR * v;
            floats numbers = load_some(row + first + VECTOR * v, most(left, 0));
            sums[v] = is_squared ? fma(numbers, numbers, sums[v]) : sums[v] + numbers;
        }
    __builtin_memcpy(chains, sums, sizeof chains);
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += chains[lane];
    return total;
}

/* The largest absolute value, or NaN where there is one. Compared as integers, which order positive floats alike, and NaN
   above them. */
INLINE float max_abs(const float *row, int64_t width) {
    ints found = 0;
    for (int64_t i = 0; i < width; i += VECTOR) {
        ints magnitudes = __builtin_bit_cast(ints, load_some(row + i, width - i)) & 0x7fffffff;
        found = magnitudes > found ? magnitudes : found;
    }
    return __builtin_bit_cast(float, __builtin_reduce_max(found));
}

/* Writes `row` [width] as row `number` of the next product's input, and its scale.

       PLAIN: input = row; scale 1
       INT8:  input = round(row / s · 127 + 128) − 128 + ZERO_POINT, ties to even, product and sum fused;
              scale s = max |row|

   A scale for each row keeps a row independent of its neighbours. */
static void prepare(const float *row, int64_t width, int64_t number, const Step *step) {
    float *scales = (float *)step->scales_at;
    if (step->mode == PLAIN) {
        float *plain = (float *)step->prepared_at + number * width;
        for (int64_t i = 0; i < width; i++) plain[i] = row[i];
        scales[number] = 1;
        return;
    }
    float largest = max_abs(row, width), scale = largest < MIN_SCALE ? MIN_SCALE : largest;
    uint8_t *levels = (uint8_t *)step->prepared_at + number * ((width + 3) / 4 * 4); /* zero weights meet the padding */
    scales[number] = scale;
    for (int64_t i = 0; i < width; i += VECTOR) {
        floats level = fma(load_some(row + i, width - i) / scale, 127.0f, 128.0f);
        ints rounded = __builtin_convertvector((level + ROUND) - ROUND, ints) - 128 + ZERO_POINT;
        bytes narrow = __builtin_convertvector(rounded, bytes);
        if (width - i >= VECTOR)
            __builtin_memcpy(levels + i, &narrow, sizeof narrow);
        else
            for (int64_t lane = 0; lane < width - i; lane++) levels[i + lane] = narrow[lane];
    }
}

/* The residual addition and the norm after it, prepared for the next product; an item is a row.

       x ← x + (product · scale + bias_in)            fused product; without a product: token embedding, and position embedding where there is one
       LAYER_NORM: μ = Σ x / width;  c = x − μ;  y = c · (1 / √(Σ c² / width + ε)) · weight + bias
       RMS_NORM:   the same with c = x and without bias

   x [rows, width] float32 is the residual stream, updated in place; product [rows, width] float32; y is handed to
   `prepare`. Row i reads x and product at `sources[i]`. Biases may be absent.
   The call has a STEP, a NORM, and the product or 0. */
KERNEL(add_and_norm) {
    const Step *step = (const Step *)call->step_at;
    const Norm *norm = (const Norm *)call->layer_at;
    const int64_t width = step->width, *sources = (const int64_t *)step->sources_at;
    const float *bias_in = (const float *)norm->bias_in_at, *bias = (const float *)norm->bias_at;
    const float *weight = (const float *)norm->weight_at;
    float *normed = (float *)step->scratch_at + thread * step->scratch_stride;
    FOR_ITEMS(number, step->num_rows) {
        const int64_t source = sources ? sources[number] : number;
        float *x = (float *)step->stream_at + source * width;
        if (call->product_at) {
            const float *added = (const float *)call->product_at + source * width;
            const floats scale = ((const float *)step->scales_in_at)[source];
            for (int64_t i = 0; i < width; i += VECTOR) {
                floats bias_in_i = bias_in ? load_some(bias_in + i, width - i) : 0.0f;
                floats sum = load_some(x + i, width - i) + fma(load_some(added + i, width - i), scale, bias_in_i);
                store_some(x + i, sum, width - i);
            }
        } else {
            const Row *row = (const Row *)step->rows_at + number;
            const float *token = (const float *)step->token_embedding_at + width * row->token_id;
            const float *position = (const float *)step->position_embedding_at + width * row->position;
            for (int64_t i = 0; i < width; i++) x[i] = step->position_embedding_at ? token[i] + position[i] : token[i];
        }
        const float mean = step->norm == LAYER_NORM ? sum_row(x, width, 0) / (float)width : 0.0f;
        for (int64_t i = 0; i < width; i++) normed[i] = x[i] - mean;
        const float inverse = 1.0f / __builtin_sqrtf(sum_row(normed, width, 1) / (float)width + step->epsilon);
        for (int64_t i = 0; i < width; i += VECTOR) {
            floats scaled = load_some(normed + i, width - i) * inverse, gain = load_some(weight + i, width - i);
            floats bias_i = bias ? load_some(bias + i, width - i) : 0.0f;
            store_some(normed + i, fma(scaled, gain, bias_i), width - i);
        }
        prepare(normed, width, number, step);
    }
}

/* product[row] ← product[row] · scales[row], float32, in place; an item is a row.

   The call has a STEP, the number of columns in `layer_at`, and product [rows, columns]. */
KERNEL(scale) {
    const Step *step = (const Step *)call->step_at;
    const int64_t num_columns = call->layer_at;
    FOR_ITEMS(number, step->num_rows) {
        float *row = (float *)call->product_at + number * num_columns;
        const float factor = ((const float *)step->scales_at)[number];
        for (int64_t i = 0; i < num_columns; i++) row[i] *= factor;
    }
}
