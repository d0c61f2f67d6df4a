// Vectors of numbers, one head a lane: 2^x, tanh, and the small matrix product behind every loop.
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

// 2^x = 2^k (1 + q), q = 2^r - 1 = r Q(r), |r| <= 1/2, with k + bias in the low bits of x + shift.
// Q is minimax, to 1.1e-8 and 1.8e-17. Logits come in base 2, so that nothing is rounded in x - k.
template <class S> struct Power;
template <> struct Power<float> {
  using Bits = int32_t;
  static constexpr int mantissa = 23;
  static constexpr float shift = 12582912.f + 127.f, zero = -127.f;
  static constexpr float Q[] = {0.693147187926f,   0.24022649795f,    0.0555035743454f,
                                0.00961823745421f, 0.00133907355457f, 0.000154035316156f};
};
template <> struct Power<double> {
  using Bits = int64_t;
  static constexpr int mantissa = 52;
  static constexpr double shift = 6755399441055744. + 1023., zero = -1023.;
  static constexpr double Q[] = {0.6931471805599453112,     0.24022650695910097891,
                                 0.055504108664821236384,   0.009618129107607064039,
                                 0.001333355814653166425,   0.00015403530441483656758,
                                 0.000015252733701194614884, 1.3215442722277882267e-6,
                                 1.0178121302447323307e-7,  7.0725621169673249131e-9,
                                 4.4455375355511690213e-10};
};
constexpr double LOG2_E = 1.44269504088896340736;

// Calls f with the size, 1..C, as a constant.
template <int C, class F> INLINE void with_size(long size, F&& f) {
  if (size == C) return f(std::integral_constant<int, C>());
  if constexpr (C > 1) with_size<C - 1>(size, f);
}

template <class S, int BYTES> struct Lanes {
  using E = Power<S>;
  using Bits = typename E::Bits;
  static constexpr long L = BYTES / sizeof(S);
  typedef S V __attribute__((vector_size(BYTES)));
  typedef Bits VBits __attribute__((vector_size(BYTES)));

  static INLINE V larger(V a, V b) { return a > b ? a : b; }

  // For x <= 0. Below the normal numbers k + bias = 0, which are the bits of scale = 0; NaN stays.
  static INLINE void power_parts(V x, V& scale, V& q) {
    x = larger(V{} + E::zero, x);
    const V shifted = x + E::shift, r = x - (shifted - E::shift);
    V p = V{} + E::Q[std::size(E::Q) - 1];
    for (int i = int(std::size(E::Q)) - 2; i >= 0; --i) p = p * r + E::Q[i];
    scale = (V)((VBits)shifted << E::mantissa);
    q = r * p;
  }
  static INLINE V power(V x) {  // 2^x
    V scale, q;
    power_parts(x, scale, q);
    return scale * q + scale;
  }
  // tanh |x| = -h / (2 + h), h = e^{-2|x|} - 1, keeps its digits near 0.
  static INLINE V tanh(V x) {
    V scale, q;
    power_parts(x * (x < 0 ? V{} + S(2 * LOG2_E) : V{} - S(2 * LOG2_E)), scale, q);
    const V h = scale * q + (scale - 1), t = -h / (h + 2);
    return x < 0 ? -t : t;
  }

  // sum_i products_i, a pair (i, i + m/2) added first. The products c_i sigma_i were rounded when
  // they were stored, not fused with this sum: those of opposite twins cancel exactly.
  static S pair_sum(const S* products, long m) {
    S lanes[L] = {}, sum = m % 2 ? products[m - 1] : 0;
    for (long i = 0; i < m / 2; ++i) lanes[i % L] += products[i] + products[i + m / 2];
    for (S lane : lanes) sum += lane;
    return sum;
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
