/* Copies past the caches: what is written is not read soon, and a line that is written whole need not be read first.
 *
 * libc does so for a copy of hundreds of megabytes, not for the megabytes of one tensor. Plain C without Python's
 * headers: it is loaded with ctypes, and where no compiler was at hand, torch does it.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define LINE 64
#define PAGE 4096
#define PAGES 4 /* read side by side, so that the processor fetches ahead in each */

#if defined(__SSE2__)
static void copy_lines(char *into, const char *from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += LINE) {
    __m128i a = _mm_loadu_si128((const __m128i *)(from + at));
    __m128i b = _mm_loadu_si128((const __m128i *)(from + at + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(from + at + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(from + at + 48));
    _mm_stream_si128((__m128i *)(into + at), a);
    _mm_stream_si128((__m128i *)(into + at + 16), b);
    _mm_stream_si128((__m128i *)(into + at + 32), c);
    _mm_stream_si128((__m128i *)(into + at + 48), d);
  }
}

static void copy_past_caches(char *into, const char *from, size_t bytes) {
  size_t head = -(uintptr_t)into & (LINE - 1);
  if (bytes < head + PAGE) {
    memcpy(into, from, bytes);
    return;
  }
  memcpy(into, from, head);
  into += head, from += head, bytes -= head;
  for (; bytes >= PAGES * PAGE; into += PAGES * PAGE, from += PAGES * PAGE, bytes -= PAGES * PAGE)
    for (size_t line = 0; line < PAGE; line += LINE)
      for (size_t page = 0; page < PAGES; page++)
        copy_lines(into + page * PAGE + line, from + page * PAGE + line, LINE);
  size_t whole = bytes & ~(size_t)(LINE - 1);
  copy_lines(into, from, whole);
  memcpy(into + whole, from + whole, bytes - whole);
}
#endif

void dure_copy_1(char *const *into, const char *const *from, const size_t *bytes, size_t count) {
  for (size_t at = 0; at < count; at++)
#if defined(__SSE2__)
    copy_past_caches(into[at], from[at], bytes[at]);
  _mm_sfence();
#else
    memcpy(into[at], from[at], bytes[at]);
#endif
}
