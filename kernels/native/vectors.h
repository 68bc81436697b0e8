/* Eight float32 side by side, which gcc and clang turn into whatever the processor has. */

#ifndef VECTORS_H
#define VECTORS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

typedef float vec __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(32), aligned(4), may_alias));

enum { LANES = 8 };

static inline vec spread(float value) { return value - (vec){0}; }

static inline vec load(const float *from) { return *(const vec *)from; }

static inline void store(float *to, vec value) { *(vec *)to = value; }

/* Lane by lane: where `mask` is -1, `yes`; where it is 0, `no`. */
static inline vec choose(ivec mask, vec yes, vec no) {
  return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

/* The lanes are always added in the same order, so a sum has the same bits every time. */
static inline float sum_of(vec v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

static inline float larger(float a, float b) { return a > b ? a : b; }

static inline float largest_of(vec v) {
  return larger(larger(larger(v[0], v[4]), larger(v[2], v[6])),
                larger(larger(v[1], v[5]), larger(v[3], v[7])));
}

/* e^x for x <= 0, to about one unit in the last place; 0 below -87.

   x = n ln 2 + r with |r| <= ln 2 / 2, so e^x = 2^n e^r. n is rounded by adding a number so large
   that float32 has no room left for a fraction. ln 2 is taken off in two parts, for a more exact
   r, and e^r is a polynomial (the constants of Cephes' expf, Moshier 1989). */
static inline vec exp_of(vec x) {
  const float no_fraction = 12582912.0f; /* 1.5 * 2^23 */
  vec shifted = x * 1.44269504088896341f + no_fraction;
  vec n = shifted - no_fraction;
  vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vec sum = spread(1.9875691500e-4f);
  sum = sum * r + 1.3981999507e-3f;
  sum = sum * r + 8.3334519073e-3f;
  sum = sum * r + 4.1665795894e-2f;
  sum = sum * r + 1.6666665459e-1f;
  sum = sum * r + 5.0000001201e-1f;
  sum = sum * r * r + r + 1.0f;
  ivec power = ((ivec)shifted - (ivec)spread(no_fraction) + 127) << 23;
  return (vec)((ivec)(sum * (vec)power) & ~(ivec)(x < -87.0f));
}

/* x / (1 + e^-x) */
static inline vec silu(vec x) {
  ivec is_negative = x < 0.0f;
  vec e = exp_of(choose(is_negative, x, -x)); /* e^-|x|, which cannot overflow */
  return x * choose(is_negative, e, spread(1.0f)) / (e + 1.0f);
}

#endif
