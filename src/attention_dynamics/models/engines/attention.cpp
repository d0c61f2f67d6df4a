// Softmax attention with one query p = gamma W q a head, and the gradients of the network on it:
//
//     alpha = softmax(X p),  s_t = U.x_t,  s = sum alpha s_t,  a = sum alpha x_t,
//     r = sum alpha (s_t - s) x_t,  f = m^{-1/2} sum_i c_i tanh(s_i),  pairs (i, i + m/2) first.
//
// Heads are the lanes of a vector, so nothing is ever summed across lanes except f, and twin heads
// round alike. All arrays over heads are in tiles of L heads: (tile, ..., lane). The tokens are read
// as they lie and broadcast. Samples are handled in small blocks; see Attention::block.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__AVX512F__)
constexpr int WIDEST = 64, TILE = 12;  // 32 registers: two vectors times 12 columns of sums
#elif defined(__AVX2__)
constexpr int WIDEST = 32, TILE = 6;
#else
constexpr int WIDEST = 16, TILE = 6;
#endif
#ifndef LANES_BYTES
#define LANES_BYTES WIDEST
#endif
constexpr long TOKENS = 64;   // tokens of a block: logits and projections stay in the first cache
constexpr long SAMPLES = 16;  // samples of a block, at most
constexpr long SLICES = 16;   // parts of the batch with gradients of their own, at most

enum Mode : int64_t { SCORES, FEATURES, SLOPES, SUMS, STEP, VJP, PULL };

struct Problem {  // the same fields in the same order as in fused.py
  int64_t mode, n, T, d, m, per_sample, threads;
  double scale;
  const void *tokens, *query, *mask, *U, *W, *c, *V, *Z, *C, *given;
  void *s, *slope, *a, *r, *sum, *squares, *f, *grad_c, *grad_U, *grad_W;
};

// e^x = 2^k (1 + q), q = e^r - 1 = r + r^2 P(r), |r| <= log(2)/2; P minimax, to 3e-9 and 4e-18.
template <class S> struct Exp;
template <> struct Exp<float> {
  using Bits = int32_t;
  static constexpr int mantissa = 23;
  static constexpr float magic = 12582912.f + 127.f, lowest = -87.f;
  static constexpr float high = 0.693359375f, low = -2.12194440e-4f;
  static constexpr float P[] = {0.499999934579f, 0.166665206945f, 0.0416683831559f,
                                0.0083687100561f, 0.00138149353865f};
};
template <> struct Exp<double> {
  using Bits = int64_t;
  static constexpr int mantissa = 52;
  static constexpr double magic = 6755399441055744. + 1023., lowest = -708.;
  static constexpr double high = 6.93145751953125e-1, low = 1.42860682030941723212e-6;
  static constexpr double P[] = {0.50000000000000106294, 0.16666666666666413121,
      0.041666666666530138289, 0.0083333333334940483156, 0.0013888888943634583914,
      0.00019841269507515647742, 0.000024801493095182800227, 2.75575855067884665e-6,
      2.7630249429196883386e-7, 2.5000344009127698029e-8};
};

template <int C, class F> inline void with_size(long size, F&& f) {
  if (size == C) return f(std::integral_constant<int, C>());
  if constexpr (C > 1) with_size<C - 1>(size, f);
}

template <class S, int BYTES> class Attention {
  using E = Exp<S>;
  using I = typename E::Bits;
  static constexpr long L = BYTES / sizeof(S);
  typedef S V __attribute__((vector_size(BYTES)));
  typedef I K __attribute__((vector_size(BYTES)));

  static V larger(V a, V b) { return a > b ? a : b; }

  static void exp_parts(V x, V& scale, V& q) {
    V shifted = x * S(1.44269504088896340736) + E::magic, k = shifted - E::magic;
    V r = x - k * E::high;
    r = r - k * E::low;
    scale = (V)((K)shifted << E::mantissa);  // the low bits of `shifted` are k plus the bias
    V p = V{} + E::P[std::size(E::P) - 1];
    for (int i = int(std::size(E::P)) - 2; i >= 0; --i) p = p * r + E::P[i];
    q = (r * r) * p + r;
  }
  static V exp(V x) {  // x <= 0; below the smallest normal number the result is 0, NaN stays
    V scale, q;
    exp_parts(x, scale, q);
    return x < E::lowest ? V{} : scale * q + scale;
  }
  static V tanh(V x) {  // -h / (2 + h), h = e^{-2|x|} - 1, is accurate near 0 too
    V y = x < 0 ? x + x : -(x + x), scale, q;
    exp_parts(y, scale, q);
    V h = y < E::lowest ? V{} - 1 : scale * q + (scale - 1), t = -h / (h + 2);
    return x < 0 ? -t : t;
  }

  // The one heavy loop: out(v, c, sum_k A_v[k] b[c, k]) with vectors A_v[k] of heads and numbers b
  // common to all heads, for N vectors v and columns c in register tiles of N times at most TILE.
  template <int N, class Out>
  static inline void product(const V* const (&A)[N], long A_step, const S* b, long b_column,
                             long b_step, long columns, long length, Out&& out) {
    for (long parts = (columns + TILE - 1) / TILE, done = 0; parts > 0; --parts) {
      long width = (columns - done + parts - 1) / parts;
      with_size<TILE>(width, [&](auto size) {
        constexpr int C = decltype(size)::value;
        V sums[N][C] = {};
        const S* column = b + done * b_column;
        for (long k = 0; k < length; ++k) {
          for (int c = 0; c < C; ++c) {
            S scalar = column[c * b_column + k * b_step];
            for (int v = 0; v < N; ++v) sums[v][c] += A[v][k * A_step] * scalar;
          }
        }
        for (int c = 0; c < C; ++c)
          for (int v = 0; v < N; ++v) out(v, done + c, sums[v][c]);
      });
      done += width;
    }
  }
  // The same for many rows of vectors, two at a time: row_step apart, out(row, c, sum).
  template <class Out>
  static void products(const V* A, long row_step, long rows, long A_step, const S* b, long b_column,
                       long b_step, long columns, long length, Out&& out) {
    long row = 0;
    for (; row + 1 < rows; row += 2)
      product<2>({A + row * row_step, A + (row + 1) * row_step}, A_step, b, b_column, b_step,
                 columns, length, [&](int v, long c, V sum) { out(row + v, c, sum); });
    if (row < rows)
      product<1>({A + row * row_step}, A_step, b, b_column, b_step, columns, length,
                 [&](int, long c, V sum) { out(row, c, sum); });
  }

  // Features of one sample for one tile of heads; a and r only if a is given. Blocks of tokens are
  // merged by the weights z_1/Z, z_2/Z of the two parts, with their largest logits kept.
  static __attribute__((noinline)) void attend(const S* x, long T, long d, const V* p, const V* U,
                                               V* l, V* u, V& s, V* a, V* r) {
    V top = V{} - std::numeric_limits<S>::infinity(), Z = {};
    s = V{};
    for (long done = 0, parts = std::max(1L, (T + TOKENS - 1) / TOKENS); parts > 0; --parts) {
      const long size = (T - done + parts - 1) / parts;
      const S* block = x + done * d;
      V top2 = V{} - std::numeric_limits<S>::infinity(), Z2 = {}, s2 = {};
      product<2>({p, U}, 1, block, d, 1, size, d, [&](int v, long t, V sum) {
        (v ? u : l)[t] = sum;
        if (v == 0) top2 = larger(sum, top2);
      });
      for (long t = 0; t < size; ++t) {
        V e = exp(l[t] - top2);
        l[t] = e;
        Z2 += e;
        s2 += e * u[t];
      }
      const bool first = done == 0;
      const V inverse = 1 / Z2, mean = s2 * inverse, both = larger(top, top2);
      const V z1 = first ? V{} : Z * exp(top - both), z2 = first ? Z2 : Z2 * exp(top2 - both);
      const V w1 = z1 / (z1 + z2), w2 = z2 / (z1 + z2), apart = w1 * w2 * (s - mean);
      if (a) {
        for (long t = 0; t < size; ++t) u[t] = l[t] * (u[t] - mean);
        product<2>({l, u}, 1, block, 1, d, d, size, [&](int v, long k, V sum) {
          V part = sum * inverse;
          if (first) return void((v ? r : a)[k] = part);
          if (v == 0) {  // called before v = 1 of the same k: r needs the old a
            V old = a[k];
            r[k] = w1 * r[k] + apart * (old - part);
            a[k] = w1 * old + w2 * part;
          } else {
            r[k] += w2 * part;
          }
        });
      }
      s = first ? mean : w1 * s + w2 * mean;
      top = both, Z = z1 + z2, done += size;
    }
  }

  const Problem& P;
  const long n, T, d, m, tiles, dW;  // dW: numbers a head of the gradient in W, or in w = W q
  long B, slices, threads, gradient_size;
  bool gradients, whole;  // whole: features of all heads are kept until f is known
  V *U, *W, *c, *V_, *Z, *C, *p, *z;
  char* partial;
  S* q;
  struct Worker {
    V *p, *z, *l, *u, *features, *sigma, *weights;
    S *products, *q, *copies, *g;
    const S* x[SAMPLES];
    long T[SAMPLES];
  };
  std::vector<Worker> workers;
  struct Part { V* sum; };
  std::vector<Part> parts;

  struct Layout {  // hands out memory; from null it only counts it
    char* base;
    size_t used = 0;
    S* numbers(long count) {
      size_t at = used;
      used += (count * sizeof(S) + 127) / 128 * 128;  // no two threads on one cache line
      return reinterpret_cast<S*>(base + at);
    }
    V* vectors(long count) { return reinterpret_cast<V*>(numbers(count * L)); }
  };
  char* plan(char* base) {
    Layout layout{base};
    const long per_head = P.per_sample ? d * d : d;
    U = layout.vectors(tiles * d), W = layout.vectors(tiles * per_head);
    c = layout.vectors(tiles), C = layout.vectors(tiles), q = layout.numbers(d);
    V_ = layout.vectors(P.V ? tiles * d : 0), Z = layout.vectors(P.Z ? tiles * per_head : 0);
    for (Part& part : parts) part.sum = layout.vectors(gradients ? tiles * (1 + d + per_head) : 0);
    for (Worker& w : workers) {
      w.p = layout.vectors(B * d), w.z = layout.vectors(B * d);
      w.l = layout.vectors(TOKENS), w.u = layout.vectors(TOKENS);
      w.features = layout.vectors((whole ? tiles : 1) * B * 2 * d);
      w.sigma = layout.vectors((whole ? tiles : 1) * B), w.weights = layout.vectors(B);
      w.products = layout.numbers(B * tiles * L), w.q = layout.numbers(B * d);
      w.copies = layout.numbers(P.mask ? B * T * d : 0), w.g = layout.numbers(B);
    }
    return base + layout.used;
  }

  // Tiles of heads from an array (m, size), with zeros for the lanes beyond m.
  void pack(const void* from, long size, V* to) const {
    if (!from) return;
    const S* array = static_cast<const S*>(from);
    S* lanes = reinterpret_cast<S*>(to);
    for (long i = 0; i < tiles * L; ++i)
      for (long k = 0; k < size; ++k)
        lanes[(i / L * size + k) * L + i % L] = i < m ? array[i * size + k] : 0;
  }

  // Tokens that the mask keeps (a run of them is used where it lies) and scaled queries.
  void gather(long j0, long b, Worker& w) const {
    const uint8_t* mask = static_cast<const uint8_t*>(P.mask);
    for (long j = 0; j < b; ++j) {
      const S* x = static_cast<const S*>(P.tokens) + (j0 + j) * T * d;
      w.x[j] = x, w.T[j] = T;
      if (mask) {
        const uint8_t* kept = mask + (j0 + j) * T;
        const long first = std::find(kept, kept + T, 1) - kept;
        w.T[j] = std::count(kept, kept + T, 1);
        w.x[j] = x + first * d;
        if (std::find(kept + first, kept + T, 0) - kept < first + w.T[j]) {
          S* to = w.copies + j * T * d;
          w.x[j] = to;
          for (long t = first; t < T; ++t)
            if (kept[t]) to = std::copy(x + t * d, x + (t + 1) * d, to);
        }
      }
      if (P.per_sample)
        for (long k = 0; k < d; ++k)
          w.q[j * d + k] = S(P.scale) * static_cast<const S*>(P.query)[(j0 + j) * d + k];
    }
  }
  const V* head_queries(const V* from, long tile, long b, Worker& w, V* to) const {
    if (!P.per_sample) return from + tile * d;
    products(from + tile * d * d, d, d, 1, w.q, d, 1, b, d,
             [&](long k, long j, V sum) { to[j * d + k] = sum; });
    return to;
  }
  void put(void* array, long j, long tile, V value) const {  // lanes of (n, m)
    std::memcpy(static_cast<S*>(array) + j * m + tile * L, &value,
                sizeof(S) * std::min(L, m - tile * L));
  }

  // Features of a block of samples for one tile of heads, and what the mode makes of them.
  void heads(long tile, long j0, long b, Worker& w) const {
    const long step = P.per_sample ? d : 0;
    const V* p = head_queries(W, tile, b, w, w.p);
    const V* z = P.Z ? head_queries(Z, tile, b, w, w.z) : nullptr;
    for (long j = 0; j < b; ++j) {
      V s, *a = w.features + ((whole ? tile * B : 0) + j) * 2 * d, *r = a + d;
      attend(w.x[j], w.T[j], d, p + j * step, U + tile * d, w.l, w.u, s,
             P.mode == SCORES ? nullptr : a, r);
      if (P.mode == STEP || P.mode == VJP) {
        V sigma = tanh(s), product = c[tile] * sigma;  // stored, hence rounded: f is exactly 0
        w.sigma[tile * B + j] = sigma;                 // where opposite twins cancel
        std::memcpy(w.products + (j * tiles + tile) * L, &product, BYTES);
      } else if (P.mode == PULL) {
        w.weights[j] = V{};
        std::memcpy(&w.weights[j], static_cast<const S*>(P.given) + (j0 + j) * m + tile * L,
                    sizeof(S) * std::min(L, m - tile * L));
      } else if (P.mode == SUMS) {
        V sigma = tanh(s), value = C[tile] * sigma;
        value += c[tile] * (1 - sigma * sigma) * slope(a, r, V_ + tile * d, z + j * step);
        double *sum = static_cast<double*>(P.sum) + j0 + j, *squares = static_cast<double*>(P.squares) + j0 + j;
        if (tile == 0) *sum = *squares = 0;
        for (long i = 0; i < L; ++i) *sum += value[i], *squares += double(value[i]) * value[i];
      } else {
        put(P.s, j0 + j, tile, s);
        if (P.mode == SLOPES) put(P.slope, j0 + j, tile, slope(a, r, V_ + tile * d, z + j * step));
        if (P.mode == FEATURES)
          for (long i = tile * L; i < std::min(m, (tile + 1) * L); ++i)
            for (long k = 0; k < d; ++k) {
              static_cast<S*>(P.a)[((j0 + j) * m + i) * d + k] = a[k][i % L];
              static_cast<S*>(P.r)[((j0 + j) * m + i) * d + k] = r[k][i % L];
            }
      }
    }
  }
  V slope(const V* a, const V* r, const V* direction, const V* z) const {
    V sum = {};
    for (long k = 0; k < d; ++k) sum += direction[k] * a[k] + r[k] * z[k];
    return sum;
  }

  // f_j, with the products c_i sigma_i of a pair added first, and g_j m^{-1/2}.
  void values(long j0, long b, Worker& w) const {
    const S norm = 1 / std::sqrt(S(m)), *given = static_cast<const S*>(P.given) + j0;
    for (long j = 0; j < b; ++j) {
      S g = given[j];
      if (P.mode == STEP) {
        const S* first = w.products + j * tiles * L;
        V sums = {};
        long half = m / 2, i = 0;
        for (; i + L <= half; i += L) {
          V one, two;
          std::memcpy(&one, first + i, BYTES), std::memcpy(&two, first + i + half, BYTES);
          sums += one + two;
        }
        S f = 0;
        for (long lane = 0; lane < L; ++lane) f += sums[lane];
        for (; i < half; ++i) f += first[i] + first[i + half];
        if (m % 2) f += first[m - 1];
        static_cast<S*>(P.f)[j0 + j] = f *= norm;
        g = 2 / S(n) * (f - g);
      }
      w.g[j] = norm * g;
    }
  }

  // Gradients of a block for one tile: sum_j g c sigma' (a, r q^T), the weights given if PULL.
  void pull(long tile, long b, Worker& w, V* part) const {
    V *features = w.features + (whole ? tile * B * 2 * d : 0), *a = features, *r = features + d;
    V *grad_U = part + tiles + tile * d, *grad_W = part + tiles * (1 + d) + tile * dW;
    if (whole)
      for (long j = 0; j < b; ++j) {
        V sigma = w.sigma[tile * B + j];
        part[tile] += w.g[j] * sigma;
        w.weights[j] = w.g[j] * c[tile] * (1 - sigma * sigma);
      }
    for (long k = 0; k < d; ++k) {
      V in_U = {}, in_w = {};
      for (long j = 0; j < b; ++j) {
        V& along = r[j * 2 * d + k];
        in_U += w.weights[j] * a[j * 2 * d + k];
        along *= w.weights[j];
        in_w += along;
      }
      grad_U[k] += in_U;
      if (!P.per_sample) grad_W[k] += in_w;
    }
    if (P.per_sample)
      products(r, 1, d, 2 * d, w.q, 1, d, d, b,
               [&](long k, long l, V sum) { grad_W[k * d + l] += sum; });
  }

  void slice(long index, Worker& w) const {
    V* part = gradients ? parts[index].sum : nullptr;
    if (gradients) std::fill(part, part + tiles * (1 + d + dW), V{});
    for (long j = n * index / slices, last = n * (index + 1) / slices; j < last; j += B) {
      const long b = std::min(B, last - j);
      gather(j, b, w);
      for (long tile = 0; tile < tiles; ++tile) {
        heads(tile, j, b, w);
        if (P.mode == PULL) pull(tile, b, w, part);
      }
      if (!whole) continue;
      values(j, b, w);
      for (long tile = 0; tile < tiles; ++tile) pull(tile, b, w, part);
    }
  }

  // Slices are added in order, whatever thread computed them, and brought to (m, size).
  void reduce() const {
    for (size_t i = 1; i < parts.size(); ++i)
      for (long k = 0; k < tiles * (1 + d + dW); ++k) parts[0].sum[k] += parts[i].sum[k];
    const S* sum = reinterpret_cast<const S*>(parts[0].sum);
    S *grad_c = static_cast<S*>(P.grad_c), *grad_U = static_cast<S*>(P.grad_U), *grad_W = static_cast<S*>(P.grad_W);
    for (long i = 0; i < m; ++i) {
      auto at = [&](long start, long size, long k) { return sum[(tiles * start + i / L * size + k) * L + i % L]; };
      if (grad_c) grad_c[i] = at(0, 1, 0);
      for (long k = 0; k < d; ++k) grad_U[i * d + k] = at(1, d, k);
      for (long k = 0; k < d; ++k)
        for (long l = 0; l < d; ++l)
          grad_W[(i * d + k) * d + l] = P.per_sample ? at(1 + d, d * d, k * d + l) : at(1 + d, d, k) * q[l];
    }
  }

 public:
  explicit Attention(const Problem& problem)
      : P(problem), n(P.n), T(P.T), d(P.d), m(P.m), tiles((m + L - 1) / L), dW(P.per_sample ? d * d : d) {
    gradients = P.mode >= STEP, whole = P.mode == STEP || P.mode == VJP;
    const long room = 1 << 18, features = (whole ? tiles : 1) * 2 * d * BYTES;
    B = std::clamp(room / std::max(features, T * d * long(sizeof(S))), 1L, SAMPLES);
    slices = std::clamp(long(double(n) * T * m * d / (1 << 18)), 1L, std::min(n, SLICES));
    threads = std::clamp(long(P.threads), 1L, slices);
    workers.resize(threads), parts.resize(gradients ? slices : 0);
  }

  void run() {
    thread_local struct Memory {  // kept between the calls of a training run
      char* base = nullptr;
      size_t size = 0;
      ~Memory() { std::free(base); }
    } memory;
    const size_t size = plan(nullptr) - static_cast<char*>(nullptr);
    if (size > memory.size) {
      std::free(memory.base);
      memory.size = 0, memory.base = static_cast<char*>(std::aligned_alloc(128, size));
      if (!memory.base) throw std::bad_alloc();
      memory.size = size;
    }
    plan(memory.base);
    pack(P.U, d, U), pack(P.c, 1, c), pack(P.C, 1, C), pack(P.V, d, V_);
    if (P.per_sample) {
      pack(P.W, d * d, W), pack(P.Z, d * d, Z);
    } else {
      for (long k = 0; k < d; ++k) q[k] = S(P.scale) * static_cast<const S*>(P.query)[k];
      fixed_queries(P.W, W), fixed_queries(P.Z, Z);
    }
    std::atomic<long> next{0};
    auto work = [&](Worker& w) {
      for (long i; (i = next++) < slices;) slice(i, w);
    };
    std::vector<std::thread> others;
    try {
      for (long i = 1; i < threads; ++i) others.emplace_back(work, std::ref(workers[i]));
    } catch (const std::system_error&) {  // no thread to be had: the slices wait for this one
    }
    work(workers[0]);
    for (std::thread& other : others) other.join();
    if (gradients) reduce();
    if (memory.size > (64u << 20)) std::free(memory.base), memory.base = nullptr, memory.size = 0;
  }
  void fixed_queries(const void* from, V* to) const {  // gamma W q of all heads
    if (!from) return;
    std::fill(to, to + tiles * d, V{});
    for (long i = 0; i < m; ++i)
      for (long k = 0; k < d; ++k) {
        S sum = 0;
        for (long l = 0; l < d; ++l) sum += static_cast<const S*>(from)[(i * d + k) * d + l] * q[l];
        reinterpret_cast<S*>(to)[(i / L * d + k) * L + i % L] = sum;
      }
  }
};

template <class S> int run(const Problem* problem) try {
  constexpr int WIDE = LANES_BYTES;
  if (WIDE > 16 && problem->m <= long(WIDE / 2 / sizeof(S)))
    Attention<S, (WIDE > 16 ? WIDE / 2 : WIDE)>(*problem).run();
  else
    Attention<S, WIDE>(*problem).run();
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}
extern "C" int attention_float(const Problem* problem) { return run<float>(problem); }
extern "C" int attention_double(const Problem* problem) { return run<double>(problem); }
