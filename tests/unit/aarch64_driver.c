/* Calls the compiled helpers on numbers made here, and prints what came of it: the same text on every machine. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PIECES 5
#define COUNT 4099
#define TURNS 2000

typedef struct {
  const float *const *pieces;
  const int *additions;
  float *const *outs;
  int num_pieces, num_additions, root, num_outs;
  int rounds_root, outs_are_cold;
  float limit;
} Plan;

int dure_tree_sum_4(const Plan *, const size_t *, size_t, float);
void dure_copy_1(char *const *, const char *const *, const size_t *, size_t);
int64_t dure_barrier_2(char *, size_t, size_t, size_t, int32_t, int64_t, int64_t);

static float held[PIECES][COUNT], out[COUNT], copied[COUNT];
static _Alignas(64) char lines[3 * 64];
static int written[2], wrong;

static void print_hash(const char *what, const void *bytes, size_t count) {
  uint64_t hash = 14695981039346656037u;
  for (size_t at = 0; at < count; at++) hash = (hash ^ ((const unsigned char *)bytes)[at]) * 1099511628211u;
  printf("%s %016llx\n", what, (unsigned long long)hash);
}

static void *meet(void *rank_of) {
  size_t rank = (size_t)rank_of;
  for (int turn = 1; turn <= TURNS; turn++) {
    written[rank] = turn; /* plain: the barrier alone orders it */
    while (dure_barrier_2(lines, 2, 64, rank, 2 * turn - 1, 1000, 200000000) != 2) continue;
    if (written[1 - rank] != turn) wrong++;
    while (dure_barrier_2(lines, 2, 64, rank, 2 * turn, 1000, 200000000) != 2) continue;
  }
  return NULL;
}

int main(void) {
  uint32_t state = 12345;
  for (int piece = 0; piece < PIECES; piece++)
    for (int at = 0; at < COUNT; at++) {
      state = state * 1664525u + 1013904223u;
      held[piece][at] = (float)(int32_t)state * 1e-7f / (float)(1 + at % 1000);
    }
  const float *pieces[PIECES];
  for (int piece = 0; piece < PIECES; piece++) pieces[piece] = held[piece];
  const int additions[] = {0, 1, 2, 3, 0, 2, 0, 4};
  float *outs[] = {out};
  const size_t range[] = {3, COUNT - 3};
  for (int rounds = 0; rounds < 2; rounds++)
    for (int cold = 0; cold < 2; cold++) {
      Plan plan = {pieces, additions, outs, PIECES, 4, 0, 1, rounds, cold, 3e38f};
      int bad = dure_tree_sum_4(&plan, range, 1, 0.37f);
      printf("bad %d ", bad);
      print_hash("sum", out, sizeof out);
    }
  char *into[] = {(char *)copied};
  const char *from[] = {(const char *)out};
  const size_t bytes[] = {sizeof out};
  dure_copy_1(into, from, bytes, 1);
  print_hash("copy", copied, sizeof copied);
  pthread_t other;
  pthread_create(&other, NULL, meet, (void *)1);
  meet((void *)0);
  pthread_join(other, NULL);
  printf("barrier wrong %d\n", wrong);
  return 0;
}
