// Attention over tokens of which all coordinates but E are a place, the same in every sample:
//
//     x_jt = I z_jt + p_t,  q_j = q + I zeta_j     (I puts E numbers into their coordinates).
//
// With Y = gamma W the logits and scores of a head are those of E coordinates and of tables that
// know no sample; their gradients in the tables are sums of weights over the samples:
//
//     l_jt = w_j . z_jt + P^0_t + sum_k zeta_jk P^k_t,    w_j = I^T Y q_j,
//     P^0_t = p_t . Y q,   P^k_t = p_t . Y I_k,            s_jt = I^T U . z_jt + p_t . U,
//     dL/dU = sum_t p_t G_t + I sum_jt alpha_j z_jt,       alpha = weights times g_j c tanh'(s_j),
//     G_t = sum_j alpha_jt,   H^k_t = sum_j zeta_jk alpha_jt (s_jt - s_j),   zeta_j0 = 1.
//
// Lanes, blocks and slices are those of attention.cpp; a block keeps its weights until f is known.
#include <cmath>
#include <exception>
#include <limits>
#include <vector>

#include "lanes.h"
#include "layout.h"
#include "slices.h"

struct PlacedProblem {  // the same fields in the same order as in placed.py
  int64_t n, T, d, m, E, own_query, threads;  // own_query: zeta = z of the query, else zeta = 0
  double scale;
  const void *values, *places, *zeta, *query;  // (n, T, E), (T, d), (n, E), (d,)
  const int64_t* own;                           // (E,), the coordinates of z
  const void *U, *W, *c, *targets;              // targets are null where only f is wanted
  void *f, *grad_c, *grad_U, *grad_W;
};

template <class S, int BYTES, int E, int K> class Placed : Lanes<S, BYTES> {
  using Base = Lanes<S, BYTES>;
  using typename Base::V;
  using Base::L, Base::power, Base::larger, Base::tanh;
  static constexpr int SIDE = WIDEST == 64 ? 4 : 2;  // samples side by side, by registers
  static constexpr long SLICES = 16, SAMPLES = 16, CACHE = 1 << 18, WORK = 1 << 16;
  // Of a tile: tables, T rows (U . p_t, P^0_t, ..), and the own part, (I^T U, I^T Y q, ..).
  static constexpr long ROW = K + 1, OWN = (K + 1) * E;

  struct Worker {
    V *weights, *inverse, *s, *sigma, *products;
    S g[SAMPLES];
  };
  struct Sums { V *c, *own, *table; };

  const PlacedProblem& P;
  const long n, T, d, m, tiles, B, slices;
  const S* places;
  Sums heads;  // c, and the two parts of the directions
  V* directions;
  std::vector<Worker> workers;
  std::vector<Sums> parts;

  size_t plan(char* base) {
    Layout memory{base};
    auto vectors = [&](long count) { return reinterpret_cast<V*>(memory.take(count * BYTES)); };
    auto sums = [&](long k) { return Sums{vectors(k), vectors(k * OWN), vectors(k * T * ROW)}; };
    heads = sums(tiles), directions = vectors(tiles * ROW * d);
    for (Sums& part : parts) part = sums(tiles);
    for (Worker& k : workers) {
      k.weights = vectors((P.targets ? tiles : 1) * B * T), k.inverse = vectors(tiles * B);
      k.s = vectors(tiles * B), k.sigma = vectors(tiles * B), k.products = vectors(tiles * B);
    }
    return memory.used;
  }

  const S* z(long j) const { return static_cast<const S*>(P.values) + j * T * E; }
  S zeta(long j, int k) const { return k ? static_cast<const S*>(P.zeta)[j * E + k - 1] : S(1); }
  S query(long l) const { return static_cast<const S*>(P.query)[l]; }
  // Of each head U, Y q and the columns Y I_k, in the units of the logits: what tokens meet.
  void prepare() const {
    std::vector<S> rows(m * ROW * d);
    const S *U = static_cast<const S*>(P.U), *W = static_cast<const S*>(P.W);
    const S unit = S(P.scale * LOG2_E);
    for (long i = 0; i < m; ++i) {
      S* to = rows.data() + i * ROW * d;
      std::copy_n(U + i * d, d, to), std::fill_n(to + d, d, S(0));
      for (long row = 0; row < d; ++row, W += d) {
        for (long l = 0; l < d; ++l) to[d + row] += unit * W[l] * query(l);
        for (int k = 1; k < K; ++k) to[(k + 1) * d + row] = unit * W[P.own[k - 1]];
      }
    }
    pack(rows.data(), m, ROW * d, L, S(1), reinterpret_cast<S*>(directions));
    pack(static_cast<const S*>(P.c), m, 1, L, S(1), reinterpret_cast<S*>(heads.c));
    for (long i = 0; i < tiles * ROW; ++i) {
      const V* A = directions + i * d;
      for (int e = 0; e < E; ++e) heads.own[i * E + e] = A[P.own[e]];
      Base::template product<1>({A}, 1, places, d, 1, T, d, [&](int, long t, V sum) {
        heads.table[(i / ROW * T + t) * ROW + i % ROW] = sum;
      });
    }
  }

  // Scores s, and weights 2^{l - top} with the inverse of their sum, of C samples and one tile.
  template <int C> void attend(long tile, long j, V* to, V* inverse, V* s) const {
    V w[C][E], top[C], Z[C] = {}, sum[C] = {};
    const V *A = heads.own + tile * OWN, *rows = heads.table + tile * T * ROW;
    for (int i = 0; i < C; ++i) {
      for (int e = 0; e < E; ++e) {
        w[i][e] = A[E + e];
        for (int k = 1; k < K; ++k) w[i][e] += zeta(j + i, k) * A[(k + 1) * E + e];
      }
      top[i] = V{} - std::numeric_limits<S>::infinity();
    }
    for (long t = 0; t < T; ++t)
      for (int i = 0; i < C; ++i) {
        V l = rows[t * ROW + 1];
        for (int k = 1; k < K; ++k) l += zeta(j + i, k) * rows[t * ROW + k + 1];
        for (int e = 0; e < E; ++e) l += w[i][e] * z(j + i)[t * E + e];
        to[i * T + t] = l, top[i] = larger(l, top[i]);
      }
    for (long t = 0; t < T; ++t)
      for (int i = 0; i < C; ++i) {
        const V weight = to[i * T + t] = power(to[i * T + t] - top[i]);
        Z[i] += weight, sum[i] += weight * score(A, rows, j + i, t);
      }
    for (int i = 0; i < C; ++i) inverse[i] = 1 / Z[i], s[i] = sum[i] * inverse[i];
  }
  V score(const V* A, const V* rows, long j, long t) const {
    V s = rows[t * ROW];
    for (int e = 0; e < E; ++e) s += A[e] * z(j)[t * E + e];
    return s;
  }

  // What C samples add to the gradients of one tile.
  template <int C>
  void pull(long tile, long j, const V* weights, const V* factor, const V* s, Sums& part) const {
    V in_U[E] = {}, in_w[C][E] = {};
    const V *A = heads.own + tile * OWN, *rows = heads.table + tile * T * ROW;
    for (long t = 0; t < T; ++t) {
      V* to = part.table + (tile * T + t) * ROW;
      V in[ROW];
      for (int k = 0; k < ROW; ++k) in[k] = to[k];
      for (int i = 0; i < C; ++i) {
        const V alpha = factor[i] * weights[i * T + t];
        const V beta = alpha * (score(A, rows, j + i, t) - s[i]);
        in[0] += alpha, in[1] += beta;
        for (int k = 1; k < K; ++k) in[k + 1] += zeta(j + i, k) * beta;
        for (int e = 0; e < E; ++e) {
          const S number = z(j + i)[t * E + e];
          in_U[e] += number * alpha, in_w[i][e] += number * beta;
        }
      }
      for (int k = 0; k < ROW; ++k) to[k] = in[k];
    }
    for (int e = 0; e < E; ++e) part.own[tile * OWN + e] += in_U[e];
    for (int i = 0; i < C; ++i)
      for (int k = 0; k < K; ++k)
        for (int e = 0; e < E; ++e)
          part.own[tile * OWN + (k + 1) * E + e] += zeta(j + i, k) * in_w[i][e];
  }

  void slice(long index, Worker& k) {
    Sums none{}, &part = P.targets ? parts[index] : none;
    if (P.targets) std::fill(part.c, part.table + tiles * T * ROW, V{});
    for (long j = n * index / slices, last = n * (index + 1) / slices; j < last; j += B) {
      const long b = std::min(B, last - j);
      for (long tile = 0; tile < tiles; ++tile) {
        V* weights = k.weights + (P.targets ? tile * B * T : 0);
        for (long i = 0; i < b; i += SIDE)
          with_size<SIDE>(std::min<long>(SIDE, b - i), [&](auto size) {
            const long at = tile * B + i;
            attend<size>(tile, j + i, weights + i * T, k.inverse + at, k.s + at);
          });
        for (long i = 0; i < b; ++i) {
          const V sigma = k.sigma[tile * B + i] = tanh(k.s[tile * B + i]);
          k.products[i * tiles + tile] = heads.c[tile] * sigma;
        }
      }
      for (long i = 0; i < b; ++i) {
        const S* products = reinterpret_cast<const S*>(k.products + i * tiles);
        const S norm = 1 / std::sqrt(S(m)), f = norm * Base::pair_sum(products, m);
        static_cast<S*>(P.f)[j + i] = f;
        if (P.targets) k.g[i] = norm * (2 / S(n)) * (f - static_cast<const S*>(P.targets)[j + i]);
      }
      for (long tile = 0; P.targets && tile < tiles; ++tile) {
        V* factor = k.inverse + tile * B;
        for (long i = 0; i < b; ++i) {
          const V sigma = k.sigma[tile * B + i];
          part.c[tile] += k.g[i] * sigma;
          factor[i] *= k.g[i] * heads.c[tile] * (1 - sigma * sigma);
        }
        for (long i = 0; i < b; i += SIDE)
          with_size<SIDE>(std::min<long>(SIDE, b - i), [&](auto size) {
            const long at = tile * B + i;
            pull<size>(tile, j + i, k.weights + at * T, factor + i, k.s + at, part);
          });
      }
    }
  }

  // Sums over slices, then over places: the gradients in the directions of each head.
  void gather() const {
    const Sums& total = parts[0];
    const long size = total.table + tiles * T * ROW - total.c;
    for (size_t i = 1; i < parts.size(); ++i)
      for (long k = 0; k < size; ++k) total.c[k] += parts[i].c[k];
    for (long i = 0; i < tiles * ROW; ++i) {
      V* to = directions + i * d;
      Base::template product<1>({total.table + i / ROW * T * ROW + i % ROW}, ROW, places, 1, d, d,
                                T, [&](int, long l, V sum) { to[l] = sum; });
      for (int e = 0; e < E; ++e) to[P.own[e]] += total.own[i * E + e];
    }
    std::vector<S> rows(m * ROW * d);
    unpack(reinterpret_cast<const S*>(directions), m, ROW * d, L, rows.data());
    unpack(reinterpret_cast<const S*>(total.c), m, 1, L, static_cast<S*>(P.grad_c));
    S* grad_W = static_cast<S*>(P.grad_W);
    for (long i = 0; i < m; ++i) {
      const S* in = rows.data() + i * ROW * d;
      std::copy_n(in, d, static_cast<S*>(P.grad_U) + i * d);
      for (long row = 0; row < d; ++row, grad_W += d) {
        for (long l = 0; l < d; ++l) grad_W[l] = S(P.scale) * in[d + row] * query(l);
        for (int k = 1; k < K; ++k) grad_W[P.own[k - 1]] += S(P.scale) * in[(k + 1) * d + row];
      }
    }
  }

 public:
  explicit Placed(const PlacedProblem& problem)
      : P(problem), n(P.n), T(P.T), d(P.d), m(P.m), tiles((m + L - 1) / L),
        B(std::clamp(CACHE / (tiles * T * BYTES), long(SIDE), SAMPLES)),
        slices(std::clamp(long(double(n) * T * m / WORK), 1L, std::min(n, SLICES))),
        places(static_cast<const S*>(P.places)),
        workers(std::clamp(long(P.threads), 1L, slices)), parts(P.targets ? slices : 0) {}

  void run() {
    static thread_local Memory memory;
    memory.reserve(plan(nullptr));
    plan(memory.base);
    prepare();
    run_slices(slices, workers, [&](long i, Worker& k) { slice(i, k); });
    if (P.targets) gather();
  }
};

template <class S> int run(const PlacedProblem* problem) try {
  with_size<2>(problem->E, [&](auto size) {
    constexpr int E = decltype(size)::value;
    problem->own_query ? Placed<S, LANES_BYTES, E, E + 1>(*problem).run()
                       : Placed<S, LANES_BYTES, E, 1>(*problem).run();
  });
  return 0;
} catch (const std::exception&) {  // no memory, or more than there can be
  return 1;
}
extern "C" int placed_float(const PlacedProblem* problem) { return run<float>(problem); }
extern "C" int placed_double(const PlacedProblem* problem) { return run<double>(problem); }
