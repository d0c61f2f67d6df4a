// What a caller asks for: the same fields in the same order as in fused.py, null where not needed.
#pragma once
#include <cstdint>

enum Mode : int64_t {
  SCORES,    // s
  FEATURES,  // s, a, r
  SLOPES,    // s and s' = V.a + r.(gamma Z q)
  SUMS,      // sum_i z_i and sum_i z_i^2, z = C tanh(s) + c tanh'(s) s'
  VALUES,    // f
  STEP,      // f and the gradients of mean (f_j - y_j)^2, y given
  VJP,       // sum_j g_j grad f_j, g given
  PULL,      // sum_j g_ji grad s_ji, g (n, m) given
};

struct Problem {
  int64_t mode, n, T, d, m;
  int64_t per_sample, threads;  // per_sample: one query a sample, (n, d), and not one for all, (d,)
  double scale;
  const void *tokens, *query;         // (n, T, d)
  const uint8_t* mask;                // (n, T), 1 = keep
  const void *U, *W, *c, *V, *Z, *C;  // (m, d), (m, d, d), (m,) twice
  const void* given;
  void *s, *slope, *a, *r;  // (n, m) twice, (n, m, d) twice
  double *sum, *squares;    // (n,)
  void *f, *grad_c, *grad_U, *grad_W;
};
