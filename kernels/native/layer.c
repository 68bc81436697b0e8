/* A whole decoder layer in two calls: between its parts, nothing goes back to Python. */

#include <omp.h>

#include "kernels.h"

/* A linear layer, see linear.c. */
struct weights {
  const float *panels, *bias;
  int inputs, outputs;
};

/* query_norm, key_norm  of every head; NULL where a model has none */
struct layer {
  struct weights query_key_value, output, gate_up, down;
  const float *attention_norm, *mlp_norm, *query_norm, *key_norm;
  float epsilon;
};

/* What is timed, in the order of PARTS in layer.py. */
enum part { NORMS, QUERY_KEY_VALUE, ROTATION, ATTENTION, OUTPUT, GATE_UP, DOWN };

/* What has gone by since `began` was for this part; the next begins. NULL: nobody asks. */
static void lap(double *seconds, enum part part, double *began) {
  if (!seconds) return;
  double now = omp_get_wtime();
  seconds[part] += now - *began;
  *began = now;
}

static void apply(const struct weights *weights, const float *rows, int num_rows, float *result) {
  linear(rows, weights->panels, weights->bias, result, num_rows, weights->inputs, weights->outputs);
}

/* x += update; heads = attention(norm(x)), and the rows' keys and values are written.

   x, update     [num_rows][hidden]
   heads         [num_rows][num_heads][head_dim]
   cos, sin      [num_positions][head_dim / 2]
   keys, values  [num_blocks][block_size][num_kv_heads][head_dim]
   scratch       for each row hidden floats and three times the outputs of query_key_value
   seconds       one for each part, to which its time is added, or NULL
   returns       0; 1: attention found no memory to work in */
int layer_attend(const struct layer *layer, const struct step *step, float *x, const float *update,
                 float *heads, const float *cos, const float *sin, float *keys, float *values,
                 float *scratch, double *seconds) {
  int num_rows = step->num_rows, dim = step->head_dim, hidden = layer->query_key_value.inputs;
  int num_heads = step->num_heads, num_kv_heads = step->num_kv_heads;
  int query_size = num_heads * dim, kv_size = num_kv_heads * dim, size = query_size + 2 * kv_size;
  float *normed = take(&scratch, (size_t)num_rows * hidden);
  float *query = take(&scratch, (size_t)num_rows * size);
  float *turned = take(&scratch, (size_t)num_rows * query_size);
  float *key = query + query_size, *value = key + kv_size;
  long query_stride = size, key_stride = size;
  double began = omp_get_wtime();
  add_rms_norm(update, x, layer->attention_norm, normed, x, layer->epsilon, num_rows, hidden);
  lap(seconds, NORMS, &began);
  apply(&layer->query_key_value, normed, num_rows, query);
  lap(seconds, QUERY_KEY_VALUE, &began);
  if (layer->query_norm) {
    float *queries = take(&scratch, (size_t)num_rows * query_size);
    float *own_keys = take(&scratch, (size_t)num_rows * kv_size);
    rms_norm(query, layer->query_norm, queries, layer->epsilon, num_rows, num_heads, dim, size);
    rms_norm(key, layer->key_norm, own_keys, layer->epsilon, num_rows, num_kv_heads, dim, size);
    query = queries, query_stride = query_size, key = own_keys, key_stride = kv_size;
    lap(seconds, NORMS, &began);
  }
  rotary_store_kv(query, key, value, cos, sin, step->positions, step->slots, turned, keys, values,
                  query_stride, key_stride, size, num_rows, num_heads, num_kv_heads, dim);
  lap(seconds, ROTATION, &began);
  int failed = attend(step, turned, keys, values, heads);
  lap(seconds, ATTENTION, &began);
  return failed;
}

/* x += output(heads); update = down(silu(gate(norm(x))) * up(norm(x))).

   x, update  [num_rows][hidden]
   heads      [num_rows][num_heads][head_dim]
   scratch    for each row 2 hidden floats, and the inputs of down
   seconds    see layer_attend */
void layer_finish(const struct layer *layer, float *x, const float *heads, float *update,
                  float *scratch, int num_rows, double *seconds) {
  int hidden = layer->output.outputs, inner = layer->down.inputs;
  float *projected = take(&scratch, (size_t)num_rows * hidden);
  float *normed = take(&scratch, (size_t)num_rows * hidden);
  double began = omp_get_wtime();
  apply(&layer->output, heads, num_rows, projected);
  lap(seconds, OUTPUT, &began);
  add_rms_norm(projected, x, layer->mlp_norm, normed, x, layer->epsilon, num_rows, hidden);
  lap(seconds, NORMS, &began);
  gated_linear(normed, layer->gate_up.panels, layer->gate_up.bias, scratch, num_rows, hidden,
               inner);
  lap(seconds, GATE_UP, &began);
  apply(&layer->down, scratch, num_rows, update);
  lap(seconds, DOWN, &began);
}
