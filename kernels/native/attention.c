/* PagedAttention on a CPU: the rows of several sequences that see the same blocks go together.

   The keys are taken in chunks of CHUNK positions, from position 0 on. For each chunk a row keeps
   the largest score so far, the sum of e^(score - largest), and the same sum weighted with the
   values (online softmax, Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022).

   Where a chunk ends depends on positions alone. So a row's bits do not depend on which rows stand
   beside it, on how much of its prompt was cached, or on how many threads there are. */

#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "tile.h"

enum {
  CHUNK = 64, /* positions whose keys are looked up together */
  PIECE = 16, /* rows of a prompt that go over a chunk together */
};

/* Neighbours in a bundle that have the same blocks where a chunk lies.

   The keys of positions [first, first + count) are looked up once for all of them. row, num_rows:
   where their rows lie in the scratch. key, value: where the keys and values lie, one KV head's. */
struct run {
  const struct span *spans, *behind;
  int first, count, row, num_rows;
  const float *key[CHUNK], *value[CHUNK];
};

/* One thread's memory. A row of it is one head of one of the bundle's rows.

   queries  [rows][head_dim], scaled       scores   [rows][CHUNK], then e^(score - largest)
   sums     [rows][width]                  keys     panels of a chunk: [CHUNK / WIDTH][head_dim][WIDTH]
   largest, weight  [rows]                 values   [width / WIDTH][CHUNK][WIDTH]
   width is head_dim, up to a whole panel. */
struct scratch {
  float *queries, *scores, *sums, *keys, *values, *largest, *weight;
  int width;
};

static int smaller(int a, int b) { return a < b ? a : b; }

static int end_of(const struct span *span) { return span->first_position + span->num_rows; }

/* A thread's memory, taken in one piece, which begins at `queries`. NULL there: there is none. */
static struct scratch new_scratch(size_t rows, size_t head_dim) {
  size_t width = (head_dim + WIDTH - 1) / WIDTH * WIDTH;
  size_t size = rows * (head_dim + CHUNK + width + 2) + CHUNK * (head_dim + width);
  float *memory = calloc(size, sizeof(float));
  struct scratch scratch = {.queries = memory, .width = (int)width};
  if (!memory) return scratch;
  take(&memory, rows * head_dim);
  scratch.scores = take(&memory, rows * CHUNK);
  scratch.sums = take(&memory, rows * width);
  scratch.keys = take(&memory, CHUNK * head_dim);
  scratch.values = take(&memory, CHUNK * width);
  scratch.largest = take(&memory, rows);
  scratch.weight = take(&memory, rows);
  return scratch;
}

/* Whether two sequences have the same blocks where the chunk lies that begins at `first`. */
static int same_blocks(const struct step *step, int a, int b, int first) {
  if (a == b) return 1;
  int from = first / step->block_size;
  int until = smaller((first + CHUNK - 1) / step->block_size + 1, step->max_blocks);
  const int *table = step->tables + (ptrdiff_t)a * step->max_blocks;
  const int *other = step->tables + (ptrdiff_t)b * step->max_blocks;
  return !memcmp(table + from, other + from, sizeof(int) * (until - from));
}

/* Eight rows of eight become eight columns. */
static inline void transpose(const float *const *from, int offset, float *to) {
  vec row[LANES], half[LANES];
  for (int i = 0; i < LANES; i++) row[i] = load(from[i] + offset);
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
  for (int i = 0; i < LANES; i += 2) {
    half[i] = PICK(row[i], row[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    half[i + 1] = PICK(row[i], row[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int j = i; j < i + 2; j++) {
      row[j] = PICK(half[j], half[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      row[j + 2] = PICK(half[j], half[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; i++) {
    store(to + i * WIDTH, PICK(row[i], row[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
    store(to + (i + 4) * WIDTH, PICK(row[i], row[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
  }
#undef PICK
}

/* While a panel of WIDTH keys is used, a line of the next run's keys a term, of as many keys. */
static inline void ask_keys(const void *wanted, int tile, int i) {
  const float *const *keys = wanted;
  if (tile == 0) __builtin_prefetch(keys[i % WIDTH] + i / WIDTH * WIDTH, 0, 2);
}

/* WIDTH of the channels of some values, from the `first` on. */
struct channels {
  const float *const *values;
  int first;
};

/* While WIDTH channels of the values are used, the same of the next run's. */
static inline void ask_values(const void *wanted, int tile, int i) {
  const struct channels *channels = wanted;
  if (tile == 0) __builtin_prefetch(channels->values[i] + channels->first, 0, 2);
}

/* Find the keys and values of a run. What the run before is too short to ask for is asked for now.

   Behind the last key it stands again, so that keys can be turned by eights: nobody looks at it.
   So does the last value, to be asked for. */
static void locate(const struct step *step, const float *keys, const float *values, int kv_head,
                   int asked_for, struct run *run) {
  const int *block = step->tables + (ptrdiff_t)run->spans->sequence * step->max_blocks +
                     run->first / step->block_size;
  int offset = run->first % step->block_size;
  for (int i = 0; i < run->count; i++) {
    ptrdiff_t slot = (ptrdiff_t)*block * step->block_size + offset;
    ptrdiff_t at = (slot * step->num_kv_heads + kv_head) * step->head_dim;
    run->key[i] = keys + at;
    run->value[i] = values + at;
    for (int c = 0; i >= asked_for && c < step->head_dim; c += WIDTH) {
      __builtin_prefetch(keys + at + c, 0, 2);
      __builtin_prefetch(values + at + c, 0, 2);
    }
    if (++offset == step->block_size) offset = 0, block++;
  }
  for (int i = run->count; i < CHUNK; i++) {
    run->key[i] = run->key[run->count - 1];
    run->value[i] = run->value[run->count - 1];
  }
}

/* Bring them into panels, see struct scratch. */
static void gather(const struct run *run, int dim, const struct scratch *to) {
  int c;
  for (int i = 0; i < run->count; i += LANES) {
    float *panel = to->keys + i / WIDTH * WIDTH * dim + i % WIDTH;
    for (c = 0; c + LANES <= dim; c += LANES) transpose(run->key + i, c, panel + c * WIDTH);
    for (; c < dim; c++)
      for (int lane = 0; lane < LANES; lane++) panel[c * WIDTH + lane] = run->key[i + lane][c];
  }
  for (c = 0; c + WIDTH <= dim; c += WIDTH)
    for (int i = 0; i < run->count; i++) {
      float *panel = to->values + c * CHUNK + i * WIDTH;
      store(panel, load(run->value[i] + c));
      store(panel + LANES, load(run->value[i] + c + LANES));
    }
  for (; c < dim; c++)
    for (int i = 0; i < run->count; i++)
      to->values[c / WIDTH * WIDTH * CHUNK + i * WIDTH + c % WIDTH] = run->value[i][c];
}

/* The scores of one row become e^(score - largest so far); it sees the first `seen` of `width`.

   Its sums so far, `channels` of them, and its weight shrink to the new largest score. */
static void soften(float *scores, int seen, int width, float *sums, int channels, float *largest,
                   float *weight) {
  for (int i = seen; i < width; i++) scores[i] = -INFINITY;
  vec top = load(scores);
  for (int i = LANES; i < width; i += LANES) {
    vec next = load(scores + i);
    top = choose(next > top, next, top);
  }
  float new_largest = larger(*largest, largest_of(top));
  vec total = {0};
  for (int i = 0; i < width; i += LANES) {
    vec each = exp_of(load(scores + i) - new_largest);
    store(scores + i, each);
    total += each;
  }
  vec shrink = exp_of(spread(*largest) - new_largest);
  for (int i = 0; i < channels; i += LANES) store(sums + i, load(sums + i) * shrink);
  *weight = *weight * shrink[0] + sum_of(total);
  *largest = new_largest;
}

/* Rows of a run go over its first `count` keys and values, as many as the last of them sees.

   spans     the rows' spans, one after another; of the first span the row `skipped` is the first
   row       of the scratch; num_rows of them
   next      the run to ask for meanwhile */
static void attend_to(const struct step *step, const struct run *run, const struct run *next,
                      const struct scratch *scratch, const struct span *span, int skipped, int row,
                      int num_rows, int count) {
  int dim = step->head_dim, width = scratch->width, group = step->num_heads / step->num_kv_heads;
  int padded = (count + WIDTH - 1) / WIDTH * WIDTH;
  float *scores = scratch->scores + (ptrdiff_t)row * CHUNK;
  float *sums = scratch->sums + (ptrdiff_t)row * width;
  memset(scores, 0, sizeof(float) * num_rows * CHUNK);
  for (int i = 0; i < count; i += WIDTH)
    panel_product(num_rows, scratch->queries + (ptrdiff_t)row * dim, dim, scratch->keys + i * dim,
                  dim, scores + i, CHUNK, ask_keys, next->key + i);
  for (int at = 0; at < num_rows; span++, skipped = 0)
    for (int i = skipped; i < span->num_rows && at < num_rows; i++)
      for (int head = 0; head < group; head++, at++) {
        int seen = smaller(span->first_position + i + 1 - run->first, count);
        if (seen > 0)
          soften(scores + at * CHUNK, seen, padded, sums + (ptrdiff_t)at * width, width,
                 scratch->largest + row + at, scratch->weight + row + at);
        else
          memset(scores + at * CHUNK, 0, sizeof(float) * padded);
      }
  for (int c = 0; c < width; c += WIDTH) {
    struct channels channels = {next->value, c};
    panel_product(num_rows, scores, CHUNK, scratch->values + c * CHUNK, count, sums + c, width,
                  ask_values, &channels);
  }
}

/* All rows of a run. Those of a prompt by PIECE positions: earlier ones see fewer keys. */
static void attend_run(const struct step *step, const struct run *run, const struct run *next,
                       const struct scratch *scratch) {
  const struct span *span = run->spans;
  int group = step->num_heads / step->num_kv_heads;
  if (span + 1 < run->behind) {
    attend_to(step, run, next, scratch, span, 0, run->row, run->num_rows, run->count);
    return;
  }
  for (int i = 0; i < span->num_rows; i += PIECE) {
    int positions = smaller(PIECE, span->num_rows - i);
    int count = smaller(span->first_position + i + positions - run->first, run->count);
    if (count > 0)
      attend_to(step, run, next, scratch, span, i, run->row + i * group, positions * group, count);
  }
}

/* The run behind `run`, of the same chunk or of the next; 0: there is none. */
static int next_run(const struct step *step, const struct span *spans, const struct span *behind,
                    const struct run *run, struct run *next) {
  int group = step->num_heads / step->num_kv_heads, context = 0;
  for (const struct span *span = spans; span < behind; span++)
    if (end_of(span) > context) context = end_of(span);
  next->first = run->first;
  next->behind = run->behind;
  next->row = run->row + run->num_rows;
  do {
    if (next->behind == behind) {
      next->first += CHUNK;
      next->behind = spans;
      next->row = 0;
    }
    if (next->first >= context) return 0;
    const struct span *span = next->spans = next->behind;
    int end = 0;
    next->num_rows = 0;
    for (; span < behind; span++) {
      if (!same_blocks(step, next->spans->sequence, span->sequence, next->first)) break;
      if (end_of(span) > end) end = end_of(span);
      next->num_rows += span->num_rows * group;
    }
    next->behind = span;
    next->count = smaller(end - next->first, CHUNK);
    if (next->count <= 0) next->row += next->num_rows;
  } while (next->count <= 0);
  return 1;
}

/* All rows of a bundle, the heads that read one KV head. */
static void attend_together(const struct step *step, const struct scratch *scratch, int bundle,
                            int kv_head, const float *query, const float *keys,
                            const float *values, float *output) {
  const struct span *spans = step->spans + step->bundles[bundle];
  const struct span *behind = step->spans + step->bundles[bundle + 1];
  int dim = step->head_dim, width = scratch->width, group = step->num_heads / step->num_kv_heads;
  float scale = 1.0f / sqrtf(dim);
  int num_rows = 0;
  for (const struct span *span = spans; span < behind; span++)
    for (int i = 0; i < span->num_rows; i++)
      for (int head = 0; head < group; head++, num_rows++) {
        ptrdiff_t at = (ptrdiff_t)(span->first_row + i) * step->num_heads + kv_head * group + head;
        for (int c = 0; c < dim; c++)
          scratch->queries[(ptrdiff_t)num_rows * dim + c] = query[at * dim + c] * scale;
        scratch->largest[num_rows] = -INFINITY;
        scratch->weight[num_rows] = 0;
      }
  memset(scratch->sums, 0, sizeof(float) * num_rows * width);
  struct run runs[2] = {{.behind = behind, .first = -CHUNK}};
  int now = 1, more = next_run(step, spans, behind, &runs[0], &runs[1]);
  locate(step, keys, values, kv_head, 0, &runs[1]);
  while (more) {
    struct run *run = &runs[now], *next = &runs[1 - now];
    more = next_run(step, spans, behind, run, next);
    if (more) locate(step, keys, values, kv_head, run->count, next);
    gather(run, dim, scratch);
    attend_run(step, run, more ? next : run, scratch);
    now = 1 - now;
  }
  int row = 0;
  for (const struct span *span = spans; span < behind; span++)
    for (int i = 0; i < span->num_rows; i++)
      for (int head = 0; head < group; head++, row++) {
        ptrdiff_t at = (ptrdiff_t)(span->first_row + i) * step->num_heads + kv_head * group + head;
        for (int c = 0; c < dim; c++)
          output[at * dim + c] = scratch->sums[(ptrdiff_t)row * width + c] / scratch->weight[row];
      }
}

/* query, output  [num_tokens][num_heads][head_dim]
   keys, values   [num_blocks][block_size][num_kv_heads][head_dim]
   returns        0; 1: there is no memory for the threads to work in */
int attend(const struct step *step, const float *query, const float *keys, const float *values,
           float *output) {
  int num_items = step->num_bundles * step->num_kv_heads, failed = 0;
  int rows = step->max_rows * (step->num_heads / step->num_kv_heads);
#pragma omp parallel reduction(| : failed)
  {
    struct scratch scratch = new_scratch(rows, step->head_dim);
    failed = !scratch.queries;
    /* The last bundles of a long prompt see the most keys: they come first. */
#pragma omp for schedule(dynamic)
    for (int item = num_items - 1; item >= 0; item--)
      if (!failed)
        attend_together(step, &scratch, item / step->num_kv_heads, item % step->num_kv_heads, query,
                        keys, values, output);
    free(scratch.queries);
  }
  return failed;
}
