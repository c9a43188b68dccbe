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
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOKS 64 /* between two looks at the clock */
#define LATE_NS INT64_C(500000) /* a core that comes back so late went to another program */
#define LEAST_PENALTY 4
#define MOST_PENALTY 1024

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

/* Sleep while a word is as it was seen, at most `sleep_ns`; 0, or an errno. */
static int sleep_on(counter *word, int32_t seen, int64_t sleep_ns) {
  struct timespec limit = {sleep_ns / 1000000000, sleep_ns % 1000000000};
  if (syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0) == 0) return 0;
  return errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT ? 0 : errno;
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
  int failed = sleep_on(peer, seen, sleep_ns);
  return failed ? -failed : reached(load(peer), value);
}

/* Behind the lines of all ranks: what they have in common. */
typedef struct {
  _Atomic uint32_t arrivals; /* of all ranks, at all barriers */
  counter over;              /* the last barrier that all have arrived at; who waits sleeps on this word */
  _Atomic uint32_t sleepers;
} Common;

/* The first rank that has not reached a value, or their number. */
static int64_t first_missing(const char *first, size_t ranks, size_t stride, int32_t value) {
  size_t rank = 0;
  while (rank < ranks && reached(load((const counter *)(first + rank * stride)), value)) rank++;
  return (int64_t)rank;
}

/* Look for `spin_ns`, on a core of one's own. */
static int is_over_soon(const Common *common, int32_t value, int64_t spin_ns) {
  int64_t until = now_ns() + spin_ns;
  do {
    for (int look = 0; look < LOOKS; look++) {
      if (reached(load(&common->over), value)) return 1;
      relax();
    }
  } while (now_ns() < until);
  return 0;
}

/* Look for as long, on a core that ranks share: it goes to whoever can run, and that is a rank that is waited for.
 *
 * Unless another program has the core meanwhile, or a rank is waited for that has none: a sleeper is then let in sooner, for
 * less. So after each time that it did not help, this process sleeps at once at the next barriers, at more and more of them. */
static int is_over_after_yields(const Common *common, int32_t value, int64_t spin_ns) {
  static _Thread_local int sleeps_at, penalty = LEAST_PENALTY;
  if (sleeps_at > 0) {
    sleeps_at--;
    return 0;
  }
  int64_t until = now_ns() + spin_ns;
  do {
    sched_yield();
    if (reached(load(&common->over), value)) {
      if (now_ns() > until + LATE_NS) break;
      penalty = LEAST_PENALTY;
      return 1;
    }
  } while (now_ns() < until);
  sleeps_at = penalty;
  penalty = penalty < MOST_PENALTY ? 2 * penalty : MOST_PENALTY;
  return reached(load(&common->over), value);
}

/* Arrive at a barrier, and wait until all have. `first` is rank 0's line, with the number of the barrier that its rank
 * has arrived at. Returns `ranks` when it is over; else, after one sleep, the first rank that is missing, for the caller to
 * look after and to call again; or minus an errno. A negative `spin_ns` is that long with yields. */
int64_t dure_barrier_2(char *first, size_t ranks, size_t stride, size_t own, int32_t value, int64_t spin_ns,
                       int64_t sleep_ns) {
  counter *arrived = (counter *)(first + own * stride);
  Common *common = (Common *)(first + ranks * stride);
  if (atomic_load_explicit(arrived, memory_order_relaxed) != value) {
    atomic_store_explicit(arrived, value, memory_order_release);
    /* Who comes last has seen what all others wrote before they came, and hands it on. */
    uint32_t arrivals = atomic_fetch_add_explicit(&common->arrivals, 1, memory_order_acq_rel) + 1;
    if (arrivals == (uint32_t)ranks * (uint32_t)value) {
      atomic_store(&common->over, value);
      if (atomic_load(&common->sleepers)) dure_counter_wake_1(&common->over);
      return (int64_t)ranks;
    }
  }
  if (reached(load(&common->over), value)) return (int64_t)ranks;
  if (spin_ns > 0 && is_over_soon(common, value, spin_ns)) return (int64_t)ranks;
  if (spin_ns < 0 && is_over_after_yields(common, value, -spin_ns)) return (int64_t)ranks;
  atomic_fetch_add(&common->sleepers, 1);
  int32_t seen = atomic_load(&common->over);
  int failed = 0;
  if (!reached(seen, value)) failed = sleep_on(&common->over, seen, sleep_ns);
  atomic_fetch_sub(&common->sleepers, 1);
  if (failed) return -failed;
  if (reached(load(&common->over), value)) return (int64_t)ranks;
  return first_missing(first, ranks, stride, value); /* all are there if the last one died before it could say so */
}
