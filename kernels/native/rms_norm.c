/* RMSNorm: each row divided by its root mean square, alone or with a residual added first. */

#include "kernels.h"
#include "vectors.h"

enum { FEW_ROWS = 8 }; /* so few are done before another thread has heard of them */

static void normalise(const float *row, const float *weight, float epsilon, int size, float *to) {
  vec squares = {0};
  int i = 0;
  for (; i + LANES <= size; i += LANES) squares += load(row + i) * load(row + i);
  float sum = sum_of(squares);
  for (; i < size; i++) sum += row[i] * row[i];
  float scale = 1.0f / sqrtf(sum / size + epsilon);
  for (i = 0; i + LANES <= size; i += LANES) store(to + i, load(row + i) * scale * load(weight + i));
  for (; i < size; i++) to[i] = row[i] * scale * weight[i];
}

/* rows, result [num_rows][size]; a row's heads are rows here. Rows of `heads` lie `stride` apart. */
void rms_norm(const float *rows, const float *weight, float *result, float epsilon, int num_rows,
              int heads, int size, long stride) {
#pragma omp parallel for if (num_rows > FEW_ROWS)
  for (int r = 0; r < num_rows; r++)
    for (int h = 0; h < heads; h++)
      normalise(rows + r * stride + h * size, weight, epsilon, size,
                result + ((ptrdiff_t)r * heads + h) * size);
}

/* total = rows + residual, result = its norm; all [num_rows][size]. The total may lie where the
   residual does. */
void add_rms_norm(const float *rows, const float *residual, const float *weight, float *result,
                  float *total, float epsilon, int num_rows, int size) {
#pragma omp parallel for if (num_rows > FEW_ROWS)
  for (int r = 0; r < num_rows; r++) {
    ptrdiff_t at = (ptrdiff_t)r * size;
    int i = 0;
    for (; i + LANES <= size; i += LANES)
      store(total + at + i, load(rows + at + i) + load(residual + at + i));
    for (; i < size; i++) total[at + i] = rows[at + i] + residual[at + i];
    normalise(total + at, weight, epsilon, size, result + at);
  }
}
