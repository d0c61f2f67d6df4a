// Features (s, a, r) of a block of samples for one tile of heads.
#pragma once
#include <algorithm>
#include <limits>

#include "lanes.h"
#include "layout.h"

constexpr long TOKENS = 128;  // tokens handled at once: what is known of them fits the first cache
constexpr long SAMPLES = 16;  // samples of a block, at most

// Sequences longer than TOKENS are cut; parts of several samples are handled together so that the
// end of one overlaps with the start of the next. Weights are w = e^{l - top}, Z their sum. Parts
// 1 and 2 of a sample merge by beta = Z_1 / Z, 1 - beta = Z_2 / Z, brought to a common top:
//     s = beta s_1 + (1 - beta) s_2,  a alike,
//     r = beta r_1 + (1 - beta) r_2 + beta (1 - beta) (s_1 - s_2) (a_1 - a_2).
template <class S, int BYTES> struct Features : Lanes<S, BYTES> {
  using Base = Lanes<S, BYTES>;
  using typename Base::V;
  using Base::exp, Base::larger;

  struct Part {
    const S* x;
    long j, start, size;  // of sample j: tokens from x on, kept at start
    V top, Z, s, inverse;
  };
  // For b samples: p + j p_step are the queries (d,), features + j 2 d takes a (d,) and r (d,) if
  // not null, s + j the score; weights and projections are work space for TOKENS vectors each.
  static __attribute__((noinline)) void attend(const Tokens<S>* samples, long b, long d, const V* p,
                                               long p_step, const V* U, V* weights, V* projections,
                                               V* s, V* features) {
    Part parts[TOKENS];
    V top[SAMPLES], Z[SAMPLES];
    for (long j = 0, t = 0; j < b;) {
      long count = 0;
      for (long room = TOKENS; j < b && count < TOKENS;) {
        const long left = samples[j].T - t, cuts = (left + TOKENS - 1) / TOKENS;
        const long size = cuts > 1 ? (left + cuts - 1) / cuts : left;
        if (size > room) break;
        parts[count].x = samples[j].x + t * d, parts[count].j = j;
        parts[count].start = TOKENS - room, parts[count].size = size;
        ++count, room -= size, t += size;
        if (t == samples[j].T) ++j, t = 0;
      }
      for (Part* part = parts; part < parts + count; ++part) {
        V largest = V{} - std::numeric_limits<S>::infinity();
        V *l = weights + part->start, *u = projections + part->start;
        Base::template product<2>({p + part->j * p_step, U}, 1, part->x, d, 1, part->size, d,
                   [&](int v, long t, V sum) {
                     (v ? u : l)[t] = sum;
                     if (v == 0) largest = larger(sum, largest);
                   });
        part->top = largest;
      }
      for (Part* part = parts; part < parts + count; ++part) {
        V *w = weights + part->start, *u = projections + part->start, total = {}, sum = {};
        for (long t = 0; t < part->size; ++t) {
          const V e = exp(w[t] - part->top);
          w[t] = e;
          total += e;
          sum += e * u[t];
        }
        part->Z = total, part->inverse = 1 / total, part->s = sum * part->inverse;
      }
      for (Part* part = parts; part < parts + count; ++part) {
        const long j = part->j;
        const V inverse = part->inverse, mean = part->s;
        const bool first = part->x == samples[j].x;
        V *w = weights + part->start, *u = projections + part->start;
        V beta = {}, rest = {}, apart = {};
        if (first) {
          top[j] = part->top, Z[j] = part->Z, s[j] = mean;
        } else {
          const V both = larger(top[j], part->top);
          const V Z1 = Z[j] * exp(top[j] - both), Z2 = part->Z * exp(part->top - both);
          top[j] = both, Z[j] = Z1 + Z2, beta = Z1 / Z[j], rest = Z2 / Z[j];
          apart = beta * rest * (s[j] - mean), s[j] = beta * s[j] + rest * mean;
        }
        if (!features) continue;
        V *a = features + j * 2 * d, *r = a + d;
        for (long t = 0; t < part->size; ++t) u[t] = w[t] * (u[t] - mean);
        auto add = [&](int v, long k, V sum) {
          const V value = sum * inverse;
          if (first) {
            (v ? r : a)[k] = value;
          } else if (v == 0) {  // comes before v = 1 of the same k: r needs the old a
            r[k] = beta * r[k] + apart * (a[k] - value);
            a[k] = beta * a[k] + rest * value;
          } else {
            r[k] += rest * value;
          }
        };
        Base::template product<2>({w, u}, 1, part->x, 1, d, d, part->size, add);
      }
    }
  }
};
