/* The one loop in which nearly all time is spent: a few rows times a panel of weights. */

#ifndef TILE_H
#define TILE_H

#include "vectors.h"

enum {
  WIDTH = 2 * LANES, /* columns of a panel */
  TILE = 6,          /* rows of a tile: 6 x 2 sums and 2 weights, of 16 registers */
};

/* Term `i` of the `tile`-th tile asks memory for a piece of what is wanted next. Asked for all at
   once, the pieces would wait for each other, and the sums for them. */
typedef void asker(const void *wanted, int tile, int i);

/* sums[r][c] += x[r][0] * panel[0][c] + x[r][1] * panel[1][c] + ...: `length` terms, one chain.

   x      `rows` rows that lie `stride` floats apart
   panel  [length][WIDTH]
   sums   [rows][WIDTH], rows `apart` floats apart


   A sum is the same chain whatever `rows` is, so a row's bits do not depend on its neighbours.
   `rows` must be a constant: then every sum stays in a register. */
static inline __attribute__((always_inline)) void tile_of(const int rows, const float *x,
                                                          ptrdiff_t stride, const float *panel,
                                                          int length, float *sums, ptrdiff_t apart,
                                                          asker *ask, const void *wanted,
                                                          int tile) {
  vec sum[TILE][2];
  for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (vec){0};
  for (int i = 0; i < length; i++) {
    const float *weights = panel + i * WIDTH;
    vec left = load(weights), right = load(weights + LANES);
    ask(wanted, tile, i);
    for (int r = 0; r < rows; r++) {
      float value = x[r * stride + i];
      sum[r][0] += value * left;
      sum[r][1] += value * right;
    }
  }
  for (int r = 0; r < rows; r++) {
    float *to = sums + r * apart;
    store(to, load(to) + sum[r][0]);
    store(to + LANES, load(to + LANES) + sum[r][1]);
  }
}

/* The same for any number of rows, in tiles as even as can be: 8 are 4 and 4, not 6 and 2. */
static inline __attribute__((always_inline)) void panel_product(int rows, const float *x,
                                                                ptrdiff_t stride,
                                                                const float *panel, int length,
                                                                float *sums, ptrdiff_t apart,
                                                                asker *ask, const void *wanted) {
  for (int done = 0, tile = 0; done < rows; tile++) {
    int tiles = (rows - done + TILE - 1) / TILE, now = (rows - done + tiles - 1) / tiles;
    const float *from = x + done * stride;
    float *to = sums + done * apart;
    switch (now) {
    case 1: tile_of(1, from, stride, panel, length, to, apart, ask, wanted, tile); break;
    case 2: tile_of(2, from, stride, panel, length, to, apart, ask, wanted, tile); break;
    case 3: tile_of(3, from, stride, panel, length, to, apart, ask, wanted, tile); break;
    case 4: tile_of(4, from, stride, panel, length, to, apart, ask, wanted, tile); break;
    case 5: tile_of(5, from, stride, panel, length, to, apart, ask, wanted, tile); break;
    default: tile_of(6, from, stride, panel, length, to, apart, ask, wanted, tile);
    }
    done += now;
  }
}

#endif
