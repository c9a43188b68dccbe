/* Adds everyone's pieces of a bucket in tree order, scales the root, and writes it to everyone: in one pass.
 *
 * What torch does in one call an addition, over blocks that stay in a core's second cache, is done here over chunks
 * that stay in its first. Every element goes through the same additions and the same multiplication, each rounded
 * once (compile with contraction off), so the bits are those of the torch calls in treesum.py.
 *
 * Plain C without Python's headers: it is loaded with ctypes, and where no compiler was at hand, torch does it.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define CHUNK 1024 /* elements: a page of each piece at a time */
#define MOST 64    /* pieces; the caller keeps to it */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

WIDEST static void add(const float *left, const float *right, float *restrict into, size_t count) {
  for (size_t i = 0; i < count; i++) into[i] = left[i] + right[i];
}

WIDEST static void add_to(float *restrict sum, const float *other, size_t count) {
  for (size_t i = 0; i < count; i++) sum[i] += other[i];
}

/* Returns whether an element is too large for `limit` afterwards, infinite or not a number. */
WIDEST static int multiply(float *restrict whole, float scale, float limit, size_t count) {
  int bad = 0;
  for (size_t i = 0; i < count; i++) {
    float scaled = whole[i] * scale;
    whole[i] = scaled;
    bad |= !(__builtin_fabsf(scaled) <= limit);
  }
  return bad;
}

/* To the nearest bfloat16, ties to even, as a float again; a NaN becomes the one that torch makes. */
WIDEST static void round_bf16(const float *from, float *restrict into, size_t count) {
  for (size_t i = 0; i < count; i++) {
    uint32_t word, rounded;
    memcpy(&word, from + i, sizeof word);
    rounded = (word + 0x7fffu + ((word >> 16) & 1u)) & 0xffff0000u;
    rounded = (word & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : rounded;
    memcpy(into + i, &rounded, sizeof rounded);
  }
}

/* Past the caches: a store that the processor would first have to read the line for costs twice. */
static void write_past_caches(float *into, const float *from, size_t count) {
#if defined(__SSE2__)
  if (((uintptr_t)into & 15) == 0) {
    size_t i = 0;
    for (; i + 4 <= count; i += 4) _mm_stream_ps(into + i, _mm_load_ps(from + i));
    for (; i < count; i++) into[i] = from[i];
    return;
  }
#endif
  memcpy(into, from, count * sizeof(float));
}

typedef struct {
  const float *const *pieces;
  const int *additions; /* pairs of positions, left <- left + right, in order */
  float *const *outs;   /* may be the pieces themselves */
  int num_pieces, num_additions, root, num_outs;
  int rounds_root;   /* round both sides of the last addition, which makes the root */
  int outs_are_cold; /* nobody has just read what stands there */
  float limit;       /* the largest value that the gradient's own type holds */
} Plan;

static int sum_chunk(const Plan *plan, size_t at, size_t count, float scale) {
  _Alignas(64) float scratch[MOST][CHUNK];
  _Alignas(64) float rounded[2][CHUNK];
  const float *held[MOST];
  float *whole = scratch[plan->root];
  for (int piece = 0; piece < plan->num_pieces; piece++) held[piece] = plan->pieces[piece] + at;
  for (int addition = 0; addition < plan->num_additions; addition++) {
    int left = plan->additions[2 * addition], right = plan->additions[2 * addition + 1];
    const float *one = held[left], *other = held[right];
    if (plan->rounds_root && addition == plan->num_additions - 1) {
      round_bf16(one, rounded[0], count);
      round_bf16(other, rounded[1], count);
      one = rounded[0];
      other = rounded[1];
    }
    if (one == scratch[left])
      add_to(scratch[left], other, count);
    else
      add(one, other, scratch[left], count);
    held[left] = scratch[left];
  }
  if (plan->num_additions == 0) memcpy(whole, held[plan->root], count * sizeof(float));
  int bad = multiply(whole, scale, plan->limit, count);
  for (int out = 0; out < plan->num_outs; out++) {
    if (plan->outs_are_cold)
      write_past_caches(plan->outs[out] + at, whole, count);
    else
      memcpy(plan->outs[out] + at, whole, count * sizeof(float));
  }
  return bad;
}

/* `ranges` are pairs: first element and number of elements. Returns 0 when all results are finite and fit. */
int dure_tree_sum_4(const Plan *plan, const size_t *ranges, size_t num_ranges, float scale) {
  int bad = 0;
  for (size_t range = 0; range < num_ranges; range++) {
    size_t stop = ranges[2 * range] + ranges[2 * range + 1];
    for (size_t at = ranges[2 * range]; at < stop; at += CHUNK)
      bad |= sum_chunk(plan, at, stop - at < CHUNK ? stop - at : CHUNK, scale);
  }
#if defined(__SSE2__)
  if (plan->outs_are_cold) _mm_sfence();
#endif
  return bad;
}
