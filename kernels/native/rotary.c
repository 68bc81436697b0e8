/* Rotary embedding, and the turned keys and the values stored in the same pass. */

#include <string.h>

#include "kernels.h"

enum { FEW_ROWS = 8 };

/* Each pair (x[i], x[i + half]) turned by its angle. */
static void turn(const float *head, const float *cos, const float *sin, int half, float *to) {
  for (int i = 0; i < half; i++) {
    float first = head[i], second = head[i + half];
    to[i] = first * cos[i] - second * sin[i];
    to[i + half] = second * cos[i] + first * sin[i];
  }
}

/* query                   [num_rows][num_heads][head_dim], rows query_stride floats apart
   key, value              [num_rows][num_kv_heads][head_dim], rows key_stride, value_stride apart
   cos, sin                [num_positions][head_dim / 2]
   positions, slots        [num_rows]
   turned                  [num_rows][num_heads][head_dim]
   key_cache, value_cache  [num_slots][num_kv_heads][head_dim] */
void rotary_store_kv(const float *query, const float *key, const float *value, const float *cos,
                     const float *sin, const int *positions, const int *slots, float *turned,
                     float *key_cache, float *value_cache, long query_stride, long key_stride,
                     long value_stride, int num_rows, int num_heads, int num_kv_heads,
                     int head_dim) {
  long half = head_dim / 2, query_size = (long)num_heads * head_dim;
  long kv_size = (long)num_kv_heads * head_dim;
#pragma omp parallel for if (num_rows > FEW_ROWS)
  for (long row = 0; row < num_rows; row++) {
    const float *row_cos = cos + positions[row] * half, *row_sin = sin + positions[row] * half;
    float *to = turned + row * query_size, *key_to = key_cache + slots[row] * kv_size;
    for (int h = 0; h < num_heads; h++)
      turn(query + row * query_stride + h * head_dim, row_cos, row_sin, half, to + h * head_dim);
    for (int h = 0; h < num_kv_heads; h++)
      turn(key + row * key_stride + h * head_dim, row_cos, row_sin, half, key_to + h * head_dim);
    memcpy(value_cache + slots[row] * kv_size, value + row * value_stride, sizeof(float) * kv_size);
  }
}
