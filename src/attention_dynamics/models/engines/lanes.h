// Vectors of numbers, one head a lane: e^x, tanh, and the small matrix product behind every loop.
#pragma once
#include <cstdint>
#include <iterator>
#include <type_traits>

#if defined(__AVX512F__)
constexpr int WIDEST = 64, TILE = 12;  // 32 registers: two vectors times 12 columns of sums fit
#elif defined(__AVX2__)
constexpr int WIDEST = 32, TILE = 6;  // 16 registers
#else
constexpr int WIDEST = 16, TILE = 6;
#endif
#ifndef LANES_BYTES  // for tests of a wider vector than the processor has
#define LANES_BYTES WIDEST
#endif
#define INLINE inline __attribute__((always_inline))

// e^x = 2^k (1 + q), q = e^r - 1 = r + r^2 P(r), |r| <= log(2)/2, with k + bias in the low bits of
// x/log(2) + shift. P is minimax, to 3e-9 and 4e-18; high + low = log(2), and k high is exact.
template <class S> struct Exponential;
template <> struct Exponential<float> {
  using Bits = int32_t;
  static constexpr int mantissa = 23;
  static constexpr float shift = 12582912.f + 127.f, lowest = -87.f;
  static constexpr float high = 0.693359375f, low = -2.12194440e-4f;
  static constexpr float P[] = {0.499999934579f, 0.166665206945f, 0.0416683831559f,
                                0.0083687100561f, 0.00138149353865f};
};
template <> struct Exponential<double> {
  using Bits = int64_t;
  static constexpr int mantissa = 52;
  static constexpr double shift = 6755399441055744. + 1023., lowest = -708.;
  static constexpr double high = 6.93145751953125e-1, low = 1.42860682030941723212e-6;
  static constexpr double P[] = {
      0.50000000000000106294,    0.16666666666666413121,    0.041666666666530138289,
      0.0083333333334940483156,  0.0013888888943634583914,  0.00019841269507515647742,
      0.000024801493095182800227, 2.75575855067884665e-6,   2.7630249429196883386e-7,
      2.5000344009127698029e-8};
};

// Calls f with the size, 1..C, as a constant.
template <int C, class F> INLINE void with_size(long size, F&& f) {
  if (size == C) return f(std::integral_constant<int, C>());
  if constexpr (C > 1) with_size<C - 1>(size, f);
}

template <class S, int BYTES> struct Lanes {
  using E = Exponential<S>;
  using Bits = typename E::Bits;
  static constexpr long L = BYTES / sizeof(S);
  typedef S V __attribute__((vector_size(BYTES)));
  typedef Bits VBits __attribute__((vector_size(BYTES)));

  static INLINE V larger(V a, V b) { return a > b ? a : b; }

  static INLINE void exp_parts(V x, V& scale, V& q) {
    const V shifted = x * S(1.44269504088896340736) + E::shift, k = shifted - E::shift;
    V r = x - k * E::high;
    r = r - k * E::low;
    V p = V{} + E::P[std::size(E::P) - 1];
    for (int i = int(std::size(E::P)) - 2; i >= 0; --i) p = p * r + E::P[i];
    scale = (V)((VBits)shifted << E::mantissa);
    q = (r * r) * p + r;
  }
  // e^x for x <= 0; 0 where it would be below the smallest normal number, NaN for NaN.
  static INLINE V exp(V x) {
    V scale, q;
    exp_parts(x, scale, q);
    return x < E::lowest ? V{} : scale * q + scale;
  }
  // tanh |x| = -h / (2 + h), h = e^{-2|x|} - 1, keeps its digits near 0.
  static INLINE V tanh(V x) {
    V y = x < 0 ? x + x : -(x + x), scale, q;
    exp_parts(y, scale, q);
    const V h = y < E::lowest ? V{} - 1 : scale * q + (scale - 1), t = -h / (h + 2);
    return x < 0 ? -t : t;
  }

  // out(v, c, sum_k A_v[k] b[c, k]): N vectors A_v of heads, numbers b common to all heads. The
  // sums of N times at most TILE columns stay in registers; the tiles are nearly equal.
  template <int N, class Out>
  static INLINE void product(const V* const (&A)[N], long A_step, const S* b, long b_column,
                             long b_step, long columns, long length, Out&& out) {
    long done = 0;
    for (long tiles = (columns + TILE - 1) / TILE; tiles > 0; --tiles) {
      const long width = tiles == 1 ? columns - done : (columns - done + tiles - 1) / tiles;
      with_size<TILE>(width, [&](auto size) {
        constexpr int C = decltype(size)::value;
        V sums[N][C] = {};
        const S* column = b + done * b_column;
        for (long k = 0; k < length; ++k)
          for (int c = 0; c < C; ++c) {
            const S scalar = column[c * b_column + k * b_step];
            for (int v = 0; v < N; ++v) sums[v][c] += A[v][k * A_step] * scalar;
          }
        for (int c = 0; c < C; ++c)
          for (int v = 0; v < N; ++v) out(v, done + c, sums[v][c]);
      });
      done += width;
    }
  }
  // The same for rows of vectors, row_step apart, two rows at a time: out(row, c, sum).
  template <class Out>
  static INLINE void products(const V* A, long row_step, long rows, long A_step, const S* b,
                              long b_column, long b_step, long columns, long length, Out&& out) {
    long row = 0;
    for (; row + 1 < rows; row += 2)
      product<2>({A + row * row_step, A + (row + 1) * row_step}, A_step, b, b_column, b_step,
                 columns, length, [&](int v, long c, V sum) { out(row + v, c, sum); });
    if (row < rows)
      product<1>({A + row * row_step}, A_step, b, b_column, b_step, columns, length,
                 [&](int, long c, V sum) { out(row, c, sum); });
  }
};
