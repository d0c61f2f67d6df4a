// Where the numbers lie: memory for a call, tokens, and arrays over heads as (tile, ..., lane).
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

struct Memory {  // kept between the calls of a training run: fresh pages cost more than a step
  char* base = nullptr;
  size_t size = 0;
  void reserve(size_t needed) {
    if (needed <= size) return;
    release();
    base = static_cast<char*>(std::aligned_alloc(128, needed));
    if (!base) throw std::bad_alloc();
    size = needed;
  }
  void release() { std::free(base), base = nullptr, size = 0; }
  ~Memory() { release(); }
};

// Hands out memory from base on; from null it only counts. No two pieces share a cache line, so
// threads that write to different ones do not wait for each other.
struct Layout {
  char* base;
  size_t used = 0;
  char* take(size_t bytes) {
    const size_t at = used;
    used += (bytes + 127) / 128 * 128;
    return base ? base + at : nullptr;
  }
};

template <class S> struct Tokens {
  const S* x;  // (T, d)
  long T;
};
// The tokens that a mask keeps: used where they lie if they are a run, else copied.
template <class S> Tokens<S> kept(const S* x, const uint8_t* mask, long T, long d, S* copies) {
  const uint8_t* first = std::find(mask, mask + T, 1);
  const long count = std::count(first, mask + T, 1);
  if (std::count(first, first + count, 1) == count) return {x + (first - mask) * d, count};
  S* to = copies;
  for (long t = 0; t < T; ++t)
    if (mask[t]) to = std::copy(x + t * d, x + (t + 1) * d, to);
  return {copies, count};
}

// An array (m, size) into tiles of L heads, zero in the lanes beyond m; and back.
template <class S> void pack(const S* from, long m, long size, long L, S factor, S* to) {
  for (long i = 0; from && i < (m + L - 1) / L * L; ++i)
    for (long k = 0; k < size; ++k)
      to[(i / L * size + k) * L + i % L] = i < m ? factor * from[i * size + k] : 0;
}
template <class S> void unpack(const S* from, long m, long size, long L, S* to) {
  for (long i = 0; i < m; ++i)
    for (long k = 0; k < size; ++k) to[i * size + k] = from[(i / L * size + k) * L + i % L];
}
