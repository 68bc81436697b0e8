/* silu(gate) * up, where silu(x) = x / (1 + e^-x): the gated half of a feed-forward layer. */

#include "vectors.h"

enum { FEW_ROWS = 2 };

static inline vec silu(vec x) {
  ivec is_negative = x < 0.0f;
  vec e = exp_of(choose(is_negative, x, -x)); /* e^-|x|, which cannot overflow */
  return x * choose(is_negative, e, spread(1.0f)) / (e + 1.0f);
}

/* gate_up [num_rows][2][size] -> result [num_rows][size] */
void silu_and_mul(const float *gate_up, float *result, int num_rows, int size) {
#pragma omp parallel for if (num_rows > FEW_ROWS)
  for (int r = 0; r < num_rows; r++) {
    const float *gate = gate_up + (ptrdiff_t)r * 2 * size, *up = gate + size;
    float *to = result + (ptrdiff_t)r * size;
    int i = 0;
    for (; i + LANES <= size; i += LANES) store(to + i, silu(load(gate + i)) * load(up + i));
    for (; i < size; i++) to[i] = silu(spread(gate[i]))[0] * up[i];
  }
}
