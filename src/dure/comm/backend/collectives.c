/* The collectives of ranks that share memory: whole operations in one call, so that Python's lock is not taken between.
 *
 * Every rank has two slots, used in turn, and all have two results. A barrier has a number; slots and results of that
 * number's parity belong to it. Before barrier n a rank fills its own slot n; between n and n + 1 it reads everyone's slot
 * n and writes its part of result n; between n + 1 and n + 2 it reads result n. So nothing is written that another rank
 * may still read, with one barrier per chunk.
 *
 * A call returns early when a rank has not come after one sleep: the caller looks after that rank and calls again, and
 * the operation goes on where it was. Plain C without Python's headers, loaded with ctypes.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MOST 64       /* ranks; the caller keeps to it */
#define BLOCK 4096    /* bytes of a piece that are combined at a time: they stay in the first cache */
#define LINE 64       /* parts begin on whole cache lines */

int64_t dure_barrier_2(char *first, size_t ranks, size_t stride, size_t own, int32_t value, int64_t spin_ns,
                       int64_t sleep_ns);

typedef struct {
  const float *const *pieces;
  const int *additions;
  float *const *outs;
  int num_pieces, num_additions, root, num_outs, rounds_root, outs_are_cold;
  float limit;
} Plan; /* as in treesum.c */
int dure_tree_sum_4(const Plan *plan, const size_t *ranges, size_t num_ranges, float scale);

typedef struct {
  char *lines;  /* of the barrier */
  char *rows;   /* two rows per rank: what it calls */
  char *slots;  /* two per rank */
  char *results;
  size_t stride, row_bytes, slot_bytes;
  int64_t ranks, own, spin_ns, sleep_ns;
  const int *additions; /* pairs of ranks, left <- left + right, in order; the sum is rank 0's then */
  int64_t num_additions;
  int64_t came; /* barriers so far */
} Channel;

enum { SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR };
enum { F32, F64, I8, U8, I16, U16, I32, U32, I64, U64 };
enum { ALL_REDUCE, REDUCE_DIRECT, BROADCAST, ALL_GATHER, REDUCE_SCATTER, BARRIER };

typedef struct {
  int64_t kind, dtype, op, root; /* root: -1 where every rank receives */
  const char *in; /* of REDUCE_SCATTER: one part per rank, `bytes` each, one after the other */
  char *const *outs; /* ALL_GATHER: one per rank, each `bytes`; else one */
  int64_t bytes;  /* of what one rank gives (a part, in REDUCE_SCATTER) */
  int64_t chunk;  /* bytes of it at a time */
  int64_t next;   /* chunks whose barrier is behind us */
  int64_t arrived; /* whether this rank has counted for chunk `next` */
} Operation;

typedef void (*combine_t)(void *restrict into, const void *restrict other, size_t count);

#define INTO(type, name, expression)                                                             \
  static void name(void *restrict into_, const void *restrict other_, size_t count) {            \
    type *restrict into = into_;                                                                 \
    const type *restrict other = other_;                                                         \
    for (size_t i = 0; i < count; i++) {                                                         \
      type a = into[i], b = other[i];                                                            \
      into[i] = (type)(expression);                                                              \
    }                                                                                            \
  }
#define NUMBERS(type, T)                        \
  INTO(type, sum_##T, a + b)                    \
  INTO(type, product_##T, a *b)                 \
  INTO(type, min_##T, b < a || b != b ? b : a)  \
  INTO(type, max_##T, b > a || b != b ? b : a)
/* Unsigned, where additions and products wrap around as torch's do; the bits are those of the signed type. */
#define INTEGERS(type, wide, T)                    \
  INTO(type, sum_##T, (wide)a + (wide)b)           \
  INTO(type, product_##T, (wide)a *(wide)b)        \
  INTO(type, min_##T, b < a ? b : a)               \
  INTO(type, max_##T, b > a ? b : a)               \
  INTO(type, band_##T, a &b)                       \
  INTO(type, bor_##T, a | b)                       \
  INTO(type, bxor_##T, a ^ b)
NUMBERS(float, F32)
NUMBERS(double, F64)
INTEGERS(int8_t, uint32_t, I8)
INTEGERS(uint8_t, uint32_t, U8)
INTEGERS(int16_t, uint32_t, I16)
INTEGERS(uint16_t, uint32_t, U16)
INTEGERS(int32_t, uint32_t, I32)
INTEGERS(uint32_t, uint32_t, U32)
INTEGERS(int64_t, uint64_t, I64)
INTEGERS(uint64_t, uint64_t, U64)

#define OF_FLOAT(T) {sum_##T, sum_##T, product_##T, min_##T, max_##T, 0, 0, 0}
#define OF_INTEGER(T) {sum_##T, sum_##T, product_##T, min_##T, max_##T, band_##T, bor_##T, bxor_##T}
static const combine_t COMBINE[][8] = {
    OF_FLOAT(F32),   OF_FLOAT(F64),   OF_INTEGER(I8),  OF_INTEGER(U8),  OF_INTEGER(I16),
    OF_INTEGER(U16), OF_INTEGER(I32), OF_INTEGER(U32), OF_INTEGER(I64), OF_INTEGER(U64),
};
static const size_t WIDTH[] = {4, 8, 1, 1, 2, 2, 4, 4, 8, 8};

#define DIVIDE(type)                                                                  \
  {                                                                                   \
    type *values = data;                                                              \
    for (size_t i = 0; i < count; i++) values[i] = (type)(values[i] / (type)ranks);   \
  }                                                                                   \
  break
static void divide(void *data, int64_t dtype, size_t count, int64_t ranks) {
  switch (dtype) {
    case F64: DIVIDE(double);
    case I8: DIVIDE(int8_t);
    case U8: DIVIDE(uint8_t);
    case I16: DIVIDE(int16_t);
    case U16: DIVIDE(uint16_t);
    case I32: DIVIDE(int32_t);
    case U32: DIVIDE(uint32_t);
    case I64: DIVIDE(int64_t);
    case U64: DIVIDE(uint64_t);
  }
}

static char *slot(const Channel *c, int64_t rank, int64_t barrier) {
  return c->slots + (2 * rank + barrier % 2) * c->slot_bytes;
}

static char *result(const Channel *c, int64_t barrier) { return c->results + (barrier % 2) * c->slot_bytes; }

/* Reduce `bytes` at `at` of everyone's slot into `outs`, in tree order by rank. What this rank gives is not in its slot
 * but at `own`, which may be the second of `outs`. */
static void reduce(const Channel *c, const Operation *o, int64_t barrier, size_t at, size_t bytes, const char *own,
                   char *const *outs, int num_outs) {
  int ranks = (int)c->ranks;
  const char *pieces[MOST];
  if (bytes == 0) return;
  for (int rank = 0; rank < ranks; rank++) pieces[rank] = rank == c->own ? own : slot(c, rank, barrier) + at;
  if (o->dtype == F32 && (o->op == SUM || o->op == AVG)) {
    Plan plan = {(const float *const *)pieces, c->additions, (float *const *)outs, ranks, (int)c->num_additions, 0,
                 num_outs, 0, 0, __builtin_inff()};
    size_t range[2] = {0, bytes / sizeof(float)};
    dure_tree_sum_4(&plan, range, 1, o->op == AVG ? 1.0f / (float)ranks : 1.0f);
    return;
  }
  combine_t combine = COMBINE[o->dtype][o->op];
  size_t width = WIDTH[o->dtype];
  _Alignas(64) char held[MOST][BLOCK];
  for (size_t done = 0; done < bytes; done += BLOCK) {
    size_t now = bytes - done < BLOCK ? bytes - done : BLOCK;
    for (int rank = 0; rank < ranks; rank++) memcpy(held[rank], pieces[rank] + done, now);
    for (int64_t addition = 0; addition < c->num_additions; addition++)
      combine(held[c->additions[2 * addition]], held[c->additions[2 * addition + 1]], now / width);
    if (o->op == AVG) divide(held[0], o->dtype, now / width, ranks);
    for (int out = 0; out < num_outs; out++) memcpy(outs[out] + done, held[0], now);
  }
}

/* This rank's part of a chunk, on whole cache lines. */
static void own_part(const Channel *c, size_t bytes, size_t *from, size_t *count) {
  size_t width = (bytes + (size_t)c->ranks - 1) / (size_t)c->ranks;
  width = (width + LINE - 1) / LINE * LINE;
  size_t start = (size_t)c->own * width, stop = start + width;
  *from = start < bytes ? start : bytes;
  *count = (stop < bytes ? stop : bytes) - *from;
}

static size_t chunk_bytes(const Operation *o, int64_t chunk) {
  int64_t left = o->bytes - chunk * o->chunk;
  return (size_t)(left < o->chunk ? left : o->chunk);
}

static int receives(const Channel *c, const Operation *o) { return o->root < 0 || o->root == c->own; }

/* Copy all but this rank's part, which no other rank needs to see, or has made. */
static void copy_others(const Channel *c, char *into, const char *from, size_t bytes) {
  size_t own, count;
  own_part(c, bytes, &own, &count);
  memcpy(into, from, own);
  memcpy(into + own + count, from + own + count, bytes - own - count);
}

static void fill(const Channel *c, const Operation *o, int64_t chunk, int64_t barrier) {
  size_t at = (size_t)(chunk * o->chunk), count = chunk_bytes(o, chunk);
  char *own = slot(c, c->own, barrier);
  if (o->kind == REDUCE_SCATTER) {
    for (int64_t rank = 0; rank < c->ranks; rank++)
      if (rank != c->own) memcpy(own + rank * o->chunk, o->in + rank * o->bytes + at, count);
  } else if (o->kind == ALL_REDUCE) {
    copy_others(c, own, o->in + at, count);
  } else if (o->kind == REDUCE_DIRECT || o->kind == ALL_GATHER ||
             (o->kind == BROADCAST && o->root == c->own)) {
    memcpy(own, o->in + at, count);
  }
}

/* What is done between the barrier of a chunk and the next one. */
static void take(const Channel *c, const Operation *o, int64_t chunk, int64_t barrier) {
  size_t at = (size_t)(chunk * o->chunk), count = chunk_bytes(o, chunk), from;
  char *outs[2];
  switch (o->kind) {
    case ALL_REDUCE:
      own_part(c, count, &from, &count);
      outs[0] = result(c, barrier) + from;
      outs[1] = receives(c, o) ? o->outs[0] + at + from : 0;
      reduce(c, o, barrier, from, count, o->in + at + from, outs, receives(c, o) ? 2 : 1);
      break;
    case REDUCE_DIRECT:
      outs[0] = o->outs[0] + at;
      if (receives(c, o)) reduce(c, o, barrier, 0, count, o->in + at, outs, 1);
      break;
    case BROADCAST:
      if (o->root != c->own) memcpy(o->outs[0] + at, slot(c, o->root, barrier), count);
      break;
    case ALL_GATHER:
      if (receives(c, o))
        for (int64_t rank = 0; rank < c->ranks; rank++)
          memcpy(o->outs[rank] + at, rank == c->own ? o->in + at : slot(c, rank, barrier), count);
      break;
    case REDUCE_SCATTER:
      outs[0] = o->outs[0] + at;
      reduce(c, o, barrier, (size_t)(c->own * o->chunk), count, o->in + c->own * o->bytes + at, outs, 1);
      break;
  }
}

/* Returns `ranks` when the operation is over on this rank; `ranks` + 1 when ranks call different things (see rows);
 * the first rank that has not come after one sleep; or minus an errno. */
int64_t dure_collective_1(Channel *c, Operation *o) {
  int64_t chunks = o->bytes > 0 ? (o->bytes + o->chunk - 1) / o->chunk : 0;
  int64_t barriers = o->kind == ALL_REDUCE && chunks ? chunks + 1 : chunks ? chunks : 1;
  while (o->next < barriers) {
    int64_t barrier = o->arrived ? c->came : c->came + 1;
    if (!o->arrived) {
      if (o->next < chunks) fill(c, o, o->next, barrier);
      c->came = barrier;
      o->arrived = 1;
    }
    int64_t came = dure_barrier_2(c->lines, (size_t)c->ranks, c->stride, (size_t)c->own, (int32_t)barrier, c->spin_ns,
                                  c->sleep_ns);
    if (came != c->ranks) return came;
    o->arrived = 0;
    int64_t chunk = o->next++;
    if (chunk == 0) {
      /* A row has two places, by the parity of the operation's first barrier: the next but one comes after all read. */
      const char *own = c->rows + (2 * c->own + barrier % 2) * c->row_bytes;
      for (int64_t rank = 0; rank < c->ranks; rank++)
        if (memcmp(own, c->rows + (2 * rank + barrier % 2) * c->row_bytes, c->row_bytes)) return c->ranks + 1;
    }
    if (chunk < chunks) take(c, o, chunk, barrier);
    if (o->kind == ALL_REDUCE && chunk > 0 && receives(c, o))
      copy_others(c, o->outs[0] + (chunk - 1) * o->chunk, result(c, barrier - 1), chunk_bytes(o, chunk - 1));
  }
  return c->ranks;
}
