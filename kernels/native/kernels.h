/* What the C files call of each other; each function is described where it stands. */

#ifndef KERNELS_H
#define KERNELS_H

#include <stddef.h>

/* The next `size` floats of a piece of memory. */
static inline float *take(float **memory, size_t size) {
  float *taken = *memory;
  *memory += size;
  return taken;
}

/* Rows at neighbouring positions of one sequence. */
struct span {
  int sequence, first_row, first_position, num_rows;
};

/* What all layers of a step have in common.

   tables    [num_sequences][max_blocks]
   spans     sorted so that sequences with the same blocks are neighbours
   bundles   [num_bundles + 1]: bundle b is the spans [bundles[b], bundles[b + 1])
   max_rows  of a bundle
   num_rows  of all bundles; their positions and slots, where keys and values go, [num_rows] */
struct step {
  const int *tables;
  const struct span *spans;
  const int *bundles, *positions, *slots;
  int max_blocks, block_size, num_bundles, max_rows;
  int num_rows, num_heads, num_kv_heads, head_dim;
};

void linear(const float *rows, const float *panels, const float *bias, float *result, int num_rows,
            int inputs, int outputs);

void gated_linear(const float *rows, const float *panels, const float *bias, float *result,
                  int num_rows, int inputs, int outputs);

int attend(const struct step *step, const float *query, const float *keys, const float *values,
           float *output);

void rotary_store_kv(const float *query, const float *key, const float *value, const float *cos,
                     const float *sin, const int *positions, const int *slots, float *turned,
                     float *key_cache, float *value_cache, long query_stride, long key_stride,
                     long value_stride, int num_rows, int num_heads, int num_kv_heads,
                     int head_dim);

void rms_norm(const float *rows, const float *weight, float *result, float epsilon, int num_rows,
              int heads, int size, long stride);

void add_rms_norm(const float *rows, const float *residual, const float *weight, float *result,
                  float *total, float epsilon, int num_rows, int size);

void silu_and_mul(const float *gate_up, float *result, int num_rows, int size);

#endif
