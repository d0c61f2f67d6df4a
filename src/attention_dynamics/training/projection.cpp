// One step of projected gradient descent, phi' = Pi(phi - eta g), head by head in one pass.
//
// Parameters are one row of numbers, c (m) | U (m, d) | W (m, d, e), and gradients three arrays.
// A block is m heads of `width` numbers, each in a ball of radius `limit` around the centre,
// infinite where the block is free. Sums are in double for both types.

#include <cmath>
#include <cstdint>

namespace {

// ||delta|| of one head, where delta = x - centre and x = phi - eta g is written to `next`.
template <class T>
double move(int64_t width, T eta, const T *phi, const T *g, const T *centre, T *next) {
  double square = 0;
#pragma omp simd reduction(+ : square)
  for (int64_t j = 0; j < width; ++j) {
    next[j] = phi[j] - eta * g[j];
    const double delta = static_cast<T>(next[j] - centre[j]);
    square += delta * delta;
  }
  return std::sqrt(square);
}

// Projects a block; *reached is max_i ||delta_i|| before that, *active how many heads were outside.
template <class T>
void project(int64_t heads, int64_t width, T eta, double limit, const T *phi, const T *g,
             const T *centre, T *next, double *reached, double *active) {
  double longest = 0, outside = 0;
  for (int64_t i = 0; i < heads; ++i) {
    const int64_t at = i * width;
    const double norm = move(width, eta, phi + at, g + at, centre + at, next + at);
    if (norm > longest || std::isnan(norm)) longest = norm;
    if (!(norm > limit)) continue;  // a head inside stays bit for bit, and NaN stays NaN
    ++outside;
    const T factor = static_cast<T>(limit / norm);
    for (int64_t j = at; j < at + width; ++j) next[j] = centre[j] + (next[j] - centre[j]) * factor;
  }
  *reached = longest;
  *active = outside;
}

// report: max_i ||delta_i|| of c, U, W, then the number of heads outside of their ball.
template <class T>
void step(int64_t heads, const int64_t *widths, const double *limits, double eta, const T *phi,
          const T *c, const T *U, const T *W, const T *centre, T *next, double *report) {
  const T *gradients[3] = {c, U, W};
  for (int64_t b = 0, at = 0; b < 3; at += heads * widths[b++])
    project(heads, widths[b], static_cast<T>(eta), limits[b], phi + at, gradients[b], centre + at,
            next + at, report + b, report + 3 + b);
}

// sum += phi - centre
template <class T>
void accumulate(int64_t count, const T *phi, const T *centre, double *sum) {
#pragma omp simd
  for (int64_t k = 0; k < count; ++k)
    sum[k] += static_cast<double>(phi[k]) - static_cast<double>(centre[k]);
}

template <class T>
double length(int64_t count, const T *block) {
  double square = 0;
#pragma omp simd reduction(+ : square)
  for (int64_t k = 0; k < count; ++k) {
    const double entry = block[k];
    square += entry * entry;
  }
  return std::sqrt(square);
}

// norms: ||c||, ||U||, ||W||
template <class T>
void measure(int64_t heads, const int64_t *widths, const T *c, const T *U, const T *W,
             double *norms) {
  const T *blocks[3] = {c, U, W};
  for (int b = 0; b < 3; ++b) norms[b] = length(heads * widths[b], blocks[b]);
}

}  // namespace

#define FOR_TYPE(T, NAME)                                                                         \
  void step_##NAME(int64_t heads, const int64_t *widths, const double *limits, double eta,        \
                   const T *phi, const T *c, const T *U, const T *W, const T *centre, T *next,    \
                   double *report) {                                                              \
    step(heads, widths, limits, eta, phi, c, U, W, centre, next, report);                         \
  }                                                                                               \
  void accumulate_##NAME(int64_t count, const T *phi, const T *centre, double *sum) {             \
    accumulate(count, phi, centre, sum);                                                          \
  }                                                                                               \
  void measure_##NAME(int64_t heads, const int64_t *widths, const T *c, const T *U, const T *W,   \
                      double *norms) {                                                            \
    measure(heads, widths, c, U, W, norms);                                                       \
  }

extern "C" {
FOR_TYPE(float, float32)
FOR_TYPE(double, float64)
}
