/* Vectors of VECTOR float32 and int32, whatever the width of the CPU's registers: the compiler splits them.

   One width in all code fixes the order of every sum, so each instruction set computes the same bits. The compiler may
   neither fuse a product with a sum nor reorder (`build.py`): where both are to be rounded once, the code says `fma`. */

#pragma once
#include <stdint.h>

#include "layouts.h" /* from layouts.py, by build.py */

#define INLINE static inline __attribute__((always_inline))
/* A loop whose count is a constant, and whose variable can therefore index registers. */
#define UNROLLED(i, number) _Pragma("clang loop unroll(full)") for (int i = 0; i < (number); i++)
#define CACHE_LINE 64
#define MAX_HALF 65504.0f /* the largest finite float16 */
#define LOWEST -3e38f     /* less than any score and any logit */

typedef float floats __attribute__((ext_vector_type(VECTOR)));
typedef int32_t ints __attribute__((ext_vector_type(VECTOR)));
typedef uint8_t bytes __attribute__((ext_vector_type(VECTOR)));
typedef uint16_t shorts __attribute__((ext_vector_type(VECTOR)));

INLINE floats fma(floats a, floats b, floats c) { return __builtin_elementwise_fma(a, b, c); }
INLINE floats larger(floats a, floats b) { return a > b ? a : b; }
INLINE floats smaller(floats a, floats b) { return a < b ? a : b; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t num_vectors(int64_t number) { return (number + VECTOR - 1) / VECTOR; }

INLINE floats load(const float *from) {
    floats numbers;
    __builtin_memcpy(&numbers, from, sizeof numbers);
    return numbers;
}

INLINE void store(float *to, floats numbers) { __builtin_memcpy(to, &numbers, sizeof numbers); }

/* The first `number` lanes; 0 in the others. */
INLINE floats load_some(const float *from, int64_t number) {
    if (number >= VECTOR) return load(from);
    float numbers[VECTOR] = {0};
    for (int64_t i = 0; i < number; i++) numbers[i] = from[i];
    return load(numbers);
}

INLINE void store_some(float *to, floats numbers, int64_t number) {
    if (number >= VECTOR) {
        store(to, numbers);
        return;
    }
    for (int64_t i = 0; i < number; i++) to[i] = numbers[i];
}

/* A mask of the first `number` lanes. */
INLINE ints lanes_before(int64_t number) {
    const ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return lanes < (ints)(int32_t)number;
}

INLINE float largest_lane(floats v) {
    v = larger(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = larger(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = larger(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    v = larger(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return v[0];
}

#if defined(__F16C__) || defined(__aarch64__)
typedef _Float16 halves __attribute__((ext_vector_type(VECTOR)));

INLINE floats from_halves(shorts numbers) {
    halves converted;
    __builtin_memcpy(&converted, &numbers, sizeof numbers);
    return __builtin_convertvector(converted, floats);
}

/* Rounds to nearest, ties to even; saturates at ±MAX_HALF. */
INLINE shorts to_halves(floats numbers) {
    halves converted = __builtin_convertvector(smaller(larger(numbers, -MAX_HALF), MAX_HALF), halves);
    shorts result;
    __builtin_memcpy(&result, &converted, sizeof result);
    return result;
}
#else /* the same in integers */
INLINE floats from_halves(shorts numbers) {
    ints wide = __builtin_convertvector(numbers, ints);
    /* The exponent's bias grows from 15 to 127; the product is exact and makes subnormal numbers normal. */
    floats magnitudes = __builtin_bit_cast(floats, (wide & 0x7fff) << 13) * 0x1p112f;
    return __builtin_bit_cast(floats, __builtin_bit_cast(ints, magnitudes) | (wide & 0x8000) << 16);
}

INLINE shorts to_halves(floats numbers) {
    ints bits = __builtin_bit_cast(ints, smaller(larger(numbers, -MAX_HALF), MAX_HALF));
    ints magnitudes = bits & 0x7fffffff;
    ints rounded = (magnitudes - (112 << 23) + 0xfff + (magnitudes >> 13 & 1)) >> 13;
    /* Adding ½ rounds a number below 2⁻¹⁴ to multiples of 2⁻²⁴, the step of subnormal float16. */
    ints subnormal = __builtin_bit_cast(ints, __builtin_bit_cast(floats, magnitudes) + 0.5f) - 0x3f000000;
    ints result = magnitudes < 0x38800000 ? subnormal : rounded;
    return __builtin_convertvector(result | (bits >> 16 & 0x8000), shorts);
}
#endif

/* The cached numbers are float32 or float16: `item_bytes` is 4 or 2. */
INLINE floats load_item(const char *from, int64_t item_bytes) {
    if (item_bytes == 4) return load((const float *)from);
    shorts numbers;
    __builtin_memcpy(&numbers, from, sizeof numbers);
    return from_halves(numbers);
}

/* Prefetches into L2. Any address is allowed, mapped or not. */
INLINE void prefetch(const void *address, int64_t num_bytes) {
    for (int64_t offset = 0; offset < num_bytes; offset += CACHE_LINE)
        __builtin_prefetch((const char *)address + offset, 0, 2);
}
