/* rows @ weight.T + bias, the weight in panels: WIDTH outputs side by side, input after input. */

#include <string.h>

#include "tile.h"

enum {
  CHAIN = 96,  /* terms of one chain; the chains of a sum are added in order */
  BLOCK = 192, /* rows at a time: their inputs stay in the processor's second cache */
};

/* rows    [num_rows][inputs]
   panels  [ceil(outputs / WIDTH)][inputs][WIDTH], 0 behind the last output
   bias    [outputs], or NULL
   result  [num_rows][outputs]

   Short chains are more exact than one long one: fewer small terms meet a large sum. And a chain's
   part of a panel, 6 KB, stays in the first cache while every row of the block goes over it. */
void linear(const float *rows, const float *panels, const float *bias, float *result, int num_rows,
            int inputs, int outputs) {
  int num_blocks = (num_rows + BLOCK - 1) / BLOCK, num_panels = (outputs + WIDTH - 1) / WIDTH;
#pragma omp parallel for collapse(2) schedule(dynamic, 4)
  for (int block = 0; block < num_blocks; block++)
    for (int index = 0; index < num_panels; index++) {
      int first = (int)((long)num_rows * block / num_blocks);
      int count = (int)((long)num_rows * (block + 1) / num_blocks) - first;
      int column = index * WIDTH, width = outputs - column < WIDTH ? outputs - column : WIDTH;
      const float *panel = panels + (ptrdiff_t)column * inputs;
      float sums[BLOCK * WIDTH];
      memset(sums, 0, sizeof(float) * count * WIDTH);
      for (int i = 0; i < inputs; i += CHAIN)
        panel_product(count, rows + (ptrdiff_t)first * inputs + i, inputs, panel + i * WIDTH,
                      inputs - i < CHAIN ? inputs - i : CHAIN, sums, WIDTH);
      for (int r = 0; r < count; r++) {
        float *to = result + (ptrdiff_t)(first + r) * outputs + column;
        for (int c = 0; c < width; c++) to[c] = sums[r * WIDTH + c] + (bias ? bias[column + c] : 0);
      }
    }
}
