/* silu(gate) * up: the gated half of a feed-forward layer. */

#include "kernels.h"
#include "vectors.h"

enum { FEW_ROWS = 2 };

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
