/* rows @ weight.T + bias, the weight in panels: WIDTH outputs side by side, input after input. */

#include <string.h>

#include "kernels.h"
#include "tile.h"

enum {
  CHAIN = 96,  /* terms of one chain; the chains of a sum are added in order */
  BLOCK = 192, /* rows at a time: their inputs stay in the processor's second cache */
};

/* What lies behind a chain's part of a panel, `step` bytes of it a term. */
struct behind {
  const char *from;
  int length, step;
};

static inline void ask_behind(const void *wanted, int tile, int i) {
  const struct behind *behind = wanted;
  __builtin_prefetch(behind->from + (ptrdiff_t)(tile * behind->length + i) * behind->step);
}

/* sums[r][c] = row r times column c of a panel, chain after chain.

   Short chains are more exact than one long one: fewer small terms meet a large sum. And a chain's
   part of a panel, 6 KB, stays in the first cache while every row of the block goes over it. */
static void sums_of(const float *rows, const float *panel, int count, int inputs, float *sums) {
  int tiles = (count + TILE - 1) / TILE, size = WIDTH * sizeof(float);
  memset(sums, 0, (size_t)count * size);
  for (int i = 0; i < inputs; i += CHAIN) {
    int length = inputs - i < CHAIN ? inputs - i : CHAIN;
    const float *chain = panel + i * WIDTH, *end = chain + length * WIDTH;
    struct behind behind = {(const char *)end, length, (size + tiles - 1) / tiles};
    panel_product(count, rows + i, inputs, chain, length, sums, WIDTH, ask_behind, &behind);
  }
}

static int blocks_of(int num_rows) { return (num_rows + BLOCK - 1) / BLOCK; }

/* Where a block begins: all have the same number of rows, or one more. */
static int start_of(int block, int num_rows) {
  return (int)((long)num_rows * block / blocks_of(num_rows));
}

/* rows    [num_rows][inputs]
   panels  [ceil(outputs / WIDTH)][inputs][WIDTH], 0 behind the last output
   bias    [outputs], or NULL
   result  [num_rows][outputs] */
void linear(const float *rows, const float *panels, const float *bias, float *result, int num_rows,
            int inputs, int outputs) {
#pragma omp parallel for collapse(2) schedule(dynamic, 4)
  for (int block = 0; block < blocks_of(num_rows); block++)
    for (int column = 0; column < outputs; column += WIDTH) {
      int first = start_of(block, num_rows), count = start_of(block + 1, num_rows) - first;
      int width = outputs - column < WIDTH ? outputs - column : WIDTH;
      float sums[BLOCK * WIDTH];
      sums_of(rows + (ptrdiff_t)first * inputs, panels + (ptrdiff_t)column * inputs, count, inputs,
              sums);
      for (int r = 0; r < count; r++) {
        float *to = result + (ptrdiff_t)(first + r) * outputs + column;
        for (int c = 0; c < width; c++) to[c] = sums[r * WIDTH + c] + (bias ? bias[column + c] : 0);
      }
    }
}

/* silu(gate) * up of the same rows, where gate and up are linear layers.

   panels  [outputs / WIDTH][2][inputs][WIDTH], a gate's panel and an up's in turn
   bias    [2][outputs], or NULL
   result  [num_rows][outputs]; outputs is a multiple of WIDTH

   What lies between the product and the result, twice as much as the result, stays in the cache. */
void gated_linear(const float *rows, const float *panels, const float *bias, float *result,
                  int num_rows, int inputs, int outputs) {
#pragma omp parallel for collapse(2) schedule(dynamic, 2)
  for (int block = 0; block < blocks_of(num_rows); block++)
    for (int column = 0; column < outputs; column += WIDTH) {
      int first = start_of(block, num_rows), count = start_of(block + 1, num_rows) - first;
      const float *from = rows + (ptrdiff_t)first * inputs;
      const float *panel = panels + (ptrdiff_t)column * 2 * inputs;
      float gate[BLOCK * WIDTH], up[BLOCK * WIDTH];
      sums_of(from, panel, count, inputs, gate);
      sums_of(from, panel + inputs * WIDTH, count, inputs, up);
      for (int r = 0; r < count; r++)
        for (int c = 0; c < WIDTH; c += LANES) {
          vec left = load(gate + r * WIDTH + c), right = load(up + r * WIDTH + c);
          if (bias) left += load(bias + column + c), right += load(bias + outputs + column + c);
          store(result + (ptrdiff_t)(first + r) * outputs + column + c, silu(left) * right);
        }
    }
}
