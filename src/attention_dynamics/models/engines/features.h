// Features (s, a, r) of a block of samples for one tile of heads.
#pragma once
#include <algorithm>
#include <limits>

#include "lanes.h"
#include "layout.h"

constexpr long TOKENS = 128;  // tokens handled at once: what is known of them fits the first cache
constexpr long SAMPLES = 16;  // samples of a block, at most

// Sequences longer than TOKENS are cut; parts of several samples are handled together so that the
// end of one overlaps with the start of the next. In a part, with logits l in base 2,
//     w_t = 2^{l_t - top},  v_t = w_t (s_t - s_0),  Z = sum w_t,  s = sum w_t s_t / Z,
//     a = sum w_t x_t / Z,  r = sum v_t x_t / Z - (s - s_0) a:
// the first projection s_0 takes off what the tokens have in common before s is known. Parts 1 and
// 2 of a sample merge by beta = Z_1 / Z and Z_2 / Z, both brought to a common top:
//     s = beta s_1 + (1 - beta) s_2,  a alike,
//     r = beta r_1 + (1 - beta) r_2 + beta (1 - beta) (s_1 - s_2) (a_1 - a_2).
template <class S, int BYTES> struct Features : Lanes<S, BYTES> {
  using Base = Lanes<S, BYTES>;
  using typename Base::V;
  using Base::power, Base::larger;

  struct Part {
    const S* x;
    long j, start, size;  // of sample j: tokens from x on, kept at start
    V top, Z, inverse, s, shift;
  };
  // For b samples: p + j p_step are the queries (d,), features + j 2 d takes a (d,) and r (d,) if
  // not null, s + j the score; pairs is work space for 2 TOKENS vectors: l and s_t, then w and v.
  static __attribute__((noinline)) void attend(const Tokens<S>* samples, long b, long d, const V* p,
                                               long p_step, const V* U, V* pairs, V* s,
                                               V* features) {
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
        V largest = V{} - std::numeric_limits<S>::infinity(), *to = pairs + 2 * part->start;
        Base::template product<2>({p + part->j * p_step, U}, 1, part->x, d, 1, part->size, d,
                                  [&](int v, long t, V sum) {
                                    to[2 * t + v] = sum;
                                    if (v == 0) largest = larger(sum, largest);
                                  });
        part->top = largest;
      }
      for (Part* part = parts; part < parts + count; ++part) {
        V *pair = pairs + 2 * part->start, total = {}, sum = {};
        const V largest = part->top, first = pair[1];
        for (V* end = pair + 2 * part->size; pair < end; pair += 2) {
          const V w = power(pair[0] - largest), u = pair[1];
          pair[0] = w, pair[1] = w * (u - first);
          total += w, sum += w * u;
        }
        part->Z = total, part->inverse = 1 / total;
        part->s = sum * part->inverse, part->shift = part->s - first;
      }
      for (Part* part = parts; part < parts + count; ++part) {
        const long j = part->j;
        const V inverse = part->inverse, shift = part->shift;
        const bool first = part->x == samples[j].x;
        V beta = {}, rest = {}, apart = {};
        if (first) {
          top[j] = part->top, Z[j] = part->Z, s[j] = part->s;
        } else {
          const V both = larger(top[j], part->top);
          const V Z1 = Z[j] * power(top[j] - both), Z2 = part->Z * power(part->top - both);
          top[j] = both, Z[j] = Z1 + Z2, beta = Z1 / Z[j], rest = Z2 / Z[j];
          apart = beta * rest * (s[j] - part->s), s[j] = beta * s[j] + rest * part->s;
        }
        if (!features) continue;
        V *a = features + j * 2 * d, *r = a + d, *pair = pairs + 2 * part->start, mean;
        auto add = [&](int v, long k, V sum) {
          sum *= inverse;
          if (v == 0) mean = sum;
          else sum -= shift * mean;
          if (first) {
            (v ? r : a)[k] = sum;
          } else if (v == 0) {  // comes before v = 1 of the same k: r needs the old a
            r[k] = beta * r[k] + apart * (a[k] - sum);
            a[k] = beta * a[k] + rest * sum;
          } else {
            r[k] += rest * sum;
          }
        };
        Base::template product<2>({pair, pair + 1}, 2, part->x, 1, d, d, part->size, add);
      }
    }
  }

  // s' = V.a + r.(gamma Z q) for V, z = gamma Z q and features a, r, all (d,).
  static V slope(const V* features, const V* direction, const V* z, long d) {
    V sum = {};
    for (long k = 0; k < d; ++k) sum += direction[k] * features[k] + features[d + k] * z[k];
    return sum;
  }
};
