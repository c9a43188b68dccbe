/* Counters in shared memory with C11 atomics: counted with release, read with acquire, waited for with a futex.
 *
 * What a rank wrote before it counted is seen by every rank that saw the count, on every machine; plain stores promise
 * that on x86 alone. Each wait here sleeps once at most: deadlines, and whether the peer still lives, are the caller's.
 *
 * Plain C without Python's headers: it is loaded with ctypes, which releases the GIL meanwhile.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOKS 64 /* between two looks at the clock */

_Static_assert(sizeof(_Atomic int32_t) == 4, "a futex is a word of four bytes");
_Static_assert(ATOMIC_INT_LOCK_FREE == 2, "a lock of this process would not order other processes");

typedef _Atomic int32_t counter;

static int32_t load(const counter *from) { return atomic_load_explicit(from, memory_order_acquire); }

/* By their difference, as counters of long runs wrap around. */
static int reached(int32_t seen, int32_t value) { return (int32_t)((uint32_t)seen - (uint32_t)value) >= 0; }

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

void dure_counter_wake_1(counter *own) {
  syscall(SYS_futex, own, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); /* not private: shared between processes */
}

/* Count up, and wake who waits. */
void dure_counter_set_1(counter *own, int32_t value) {
  atomic_store_explicit(own, value, memory_order_release);
  dure_counter_wake_1(own);
}

/* Whether the counters of all ranks, `stride` bytes apart, have reached a value. */
int dure_counters_reached_1(const char *first, size_t ranks, size_t stride, int32_t value) {
  for (size_t rank = 0; rank < ranks; rank++)
    if (!reached(load((const counter *)(first + rank * stride)), value)) return 0;
  return 1;
}

/* Look for `spin_ns`, then sleep until woken, at most `sleep_ns`. 1: reached; 0: not yet; else minus an errno. */
int dure_counter_wait_1(counter *peer, int32_t value, int64_t spin_ns, int64_t sleep_ns) {
  int32_t seen = load(peer);
  if (reached(seen, value)) return 1;
  if (spin_ns > 0) {
    int64_t until = now_ns() + spin_ns;
    do {
      for (int look = 0; look < LOOKS; look++) {
        if (reached(seen = load(peer), value)) return 1;
        relax();
      }
    } while (now_ns() < until);
  }
  struct timespec limit = {sleep_ns / 1000000000, sleep_ns % 1000000000};
  if (syscall(SYS_futex, peer, FUTEX_WAIT, seen, &limit, NULL, 0) == -1 && errno != EAGAIN && errno != EINTR &&
      errno != ETIMEDOUT)
    return -errno;
  return reached(load(peer), value);
}

/* Count this rank's counter up to a value and wait for everyone's. Returns `ranks` when all have reached it; else the
 * first rank that has not after one sleep, for the caller to look after; or minus an errno. */
int64_t dure_barrier_1(char *first, size_t ranks, size_t stride, size_t own, int32_t value, int64_t spin_ns,
                       int64_t sleep_ns) {
  dure_counter_set_1((counter *)(first + own * stride), value);
  for (size_t rank = 0; rank < ranks; rank++) {
    int reached = dure_counter_wait_1((counter *)(first + rank * stride), value, spin_ns, sleep_ns);
    if (reached < 0) return reached;
    if (!reached) return (int64_t)rank;
  }
  return (int64_t)ranks;
}
