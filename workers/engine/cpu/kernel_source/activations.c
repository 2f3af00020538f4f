/* The activation functions between a layer's two last products. Formulas as transformers' `ACT2FN` has them. */

#include "kernels.h"

/* gelu_new: ½x(1 + tanh u), u = √(2/π)(x + 0.044715x³), computed as x / (1 + exp(−2u))
   gelu: ½x(1 + erf(x / √2));  relu: max(0, x);  silu: x / (1 + exp(−x));  tanh */
INLINE floats activated(floats x, int64_t activation) {
    const float c = 0.7978845608028654f; /* √(2/π) */
    switch (activation) {
    case GELU_TANH: return x / (1.0f + exp_floats(x * fma(x * x, -2.0f * c * 0.044715f, -2.0f * c)));
    case GELU: return 0.5f * x * (1.0f + erf_floats(x * 0.7071067811865476f));
    case RELU: return larger(x, 0.0f);
    case SILU: return x / (1.0f + exp_floats(-x));
    default: return tanh_floats(x);
    }
}

INLINE void activate_row(float *row, const float *bias, float scale, int64_t width, int64_t activation, int is_gated) {
    const float *up = row + width, *up_bias = bias ? bias + width : 0;
    for (int64_t i = 0; i < width; i += VECTOR) {
        floats bias_i = bias ? load_some(bias + i, width - i) : 0.0f;
        floats y = activated(fma(load_some(row + i, width - i), scale, bias_i), activation);
        if (is_gated) {
            floats up_bias_i = bias ? load_some(up_bias + i, width - i) : 0.0f;
            y *= fma(load_some(up + i, width - i), scale, up_bias_i);
        }
        store_some(row + i, y, width - i);
    }
}

/* f(product · scale + bias), prepared for the next product; an item is a row. With a gate, the first half of the product
   is activated and multiplied with the second.

   product [rows, inner, with a gate twice as many] float32, overwritten; scales [rows], bias as long as a row or absent;
   product and sum are fused.
   The call has a STEP, a LAYER, and the product. */
KERNEL(activate) {
    const Step *step = (const Step *)call->step_at;
    const float *bias = (const float *)((const Layer *)call->layer_at)->up_bias_at;
    const int64_t inner = step->inner, row_width = step->is_gated ? 2 * inner : inner;
    FOR_ITEMS(number, step->num_rows) {
        float *row = (float *)call->product_at + number * row_width, scale = ((const float *)step->scales_at)[number];
        switch (step->activation * 2 + !!step->is_gated) {
        case GELU_TANH * 2: activate_row(row, bias, scale, inner, GELU_TANH, 0); break;
        case GELU * 2: activate_row(row, bias, scale, inner, GELU, 0); break;
        case RELU * 2: activate_row(row, bias, scale, inner, RELU, 0); break;
        case SILU * 2: activate_row(row, bias, scale, inner, SILU, 0); break;
        case TANH * 2: activate_row(row, bias, scale, inner, TANH, 0); break;
        case GELU_TANH * 2 + 1: activate_row(row, bias, scale, inner, GELU_TANH, 1); break;
        case GELU * 2 + 1: activate_row(row, bias, scale, inner, GELU, 1); break;
        case RELU * 2 + 1: activate_row(row, bias, scale, inner, RELU, 1); break;
        case SILU * 2 + 1: activate_row(row, bias, scale, inner, SILU, 1); break;
        default: activate_row(row, bias, scale, inner, TANH, 1);
        }
        prepare(row, inner, number, step);
    }
}
