/* exp, erf, tanh and log. The C library's differ between systems in the last bit. */

#pragma once
#include "vectors.h"

#define ROUND 12582912.0f /* 1.5 · 2²³: adding and subtracting it rounds a float32 to an integer, ties to even */

/* exp(x) = 2ⁿ · exp(r), n = round(x / log 2), r = x - n · log 2, |r| ≤ ½ log 2; log 2 is split in two floats so that r is
   exact. exp(r) = 1 + r + r² · P(r): Cephes' polynomial (Moshier, expf). Within 2 units in the last place. x is limited
   to [−87, 88]: beyond, the result would be subnormal or infinite. */
INLINE floats exp_floats(floats x) {
    x = smaller(larger(x, -87.0f), 88.0f);
    floats n = fma(x, 1.44269504f, ROUND) - ROUND;
    floats r = fma(n, -0.693359375f, x);
    r = fma(n, 2.12194440e-4f, r);
    floats p = 1.9875691500e-4f;
    p = fma(p, r, 1.3981999507e-3f);
    p = fma(p, r, 8.3334519073e-3f);
    p = fma(p, r, 4.1665795894e-2f);
    p = fma(p, r, 1.6666665459e-1f);
    p = fma(p, r, 5.0000001201e-1f);
    p = fma(p, r * r, r) + 1.0f;
    ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return p * __builtin_bit_cast(floats, power);
}

/* tanh x = ±(1 − e) / (1 + e), e = exp(−2|x|) */
INLINE floats tanh_floats(floats x) {
    floats e = exp_floats(-2.0f * __builtin_elementwise_abs(x));
    floats magnitudes = (1.0f - e) / (1.0f + e);
    return x < 0.0f ? -magnitudes : magnitudes;
}

/* A quotient of polynomials in x², for |x| ≤ 4, beyond which erf is ±1 to within half a unit in the last place. Source of
   the coefficients: Eigen, MathFunctionsImpl.h, as XLA has them. Within 6e-7. */
INLINE floats erf_floats(floats x) {
    x = smaller(larger(x, -4.0f), 4.0f);
    floats x2 = x * x;
    floats p = -2.72614225801306e-10f;
    p = fma(p, x2, 2.77068142495902e-08f);
    p = fma(p, x2, -2.10102402082508e-06f);
    p = fma(p, x2, -5.69250639462346e-05f);
    p = fma(p, x2, -7.34990630326855e-04f);
    p = fma(p, x2, -2.95459980854025e-03f);
    p = fma(p, x2, -1.60960333262415e-02f);
    floats q = -1.45660718464996e-05f;
    q = fma(q, x2, -2.13374055278905e-04f);
    q = fma(q, x2, -1.68282697438203e-03f);
    q = fma(q, x2, -7.37332916720468e-03f);
    q = fma(q, x2, -1.42647390514189e-02f);
    return x * p / q;
}

/* As `exp_floats`, for one float64 that is at most 0: Taylor's polynomial of degree 13. */
INLINE double exp_double(double x) {
    const double round = 0x1.8p52;
    if (!(x > -708.0)) return 0.0;
    double n = __builtin_fma(x, 1.4426950408889634, round) - round;
    double r = __builtin_fma(n, -0.6931471805599453, x);
    r = __builtin_fma(n, -2.3190468138462996e-17, r);
    double p = 1.0;
    for (int k = 13; k > 0; k--) p = __builtin_fma(p, r / k, 1.0);
    int64_t power = ((int64_t)n + 1023) << 52;
    return p * __builtin_bit_cast(double, power);
}

/* log x = n · log 2 + 2 artanh s, s = (m − 1) / (m + 1), x = 2ⁿ · m, √½ ≤ m < √2; NaN unless x is positive and finite. */
INLINE double log_double(double x) {
    if (!(x >= 0x1p-1022 && x < __builtin_inf())) return __builtin_nan("");
    int64_t bits = __builtin_bit_cast(int64_t, x) - 0x3fe6a09e667f3bcd; /* √½ */
    int64_t n = bits >> 52;
    double m = __builtin_bit_cast(double, (bits & 0xfffffffffffff) + 0x3fe6a09e667f3bcd);
    double s = (m - 1.0) / (m + 1.0), s2 = s * s, p = 0.0;
    for (int k = 21; k > 0; k -= 2) p = __builtin_fma(p, s2, 1.0 / k);
    return __builtin_fma((double)n, 0.6931471805599453, 2.0 * s * p);
}
