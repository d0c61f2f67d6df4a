// Softmax attention with one query p = gamma W q a head, and the gradients of the network on it:
//
//     alpha = softmax(X p),  s_t = U.x_t,  s = sum alpha s_t,  a = sum alpha x_t,
//     r = sum alpha (s_t - s) x_t,         f = m^{-1/2} sum_i c_i tanh(s_i).
//
// Heads are the lanes of a vector and lie in tiles of L heads, (tile, ..., lane): nothing is summed
// across lanes except f, and twin heads round alike. Tokens are read where they lie and broadcast.
// A block of samples goes through all heads, tile by tile; then f is known, and what the block adds
// to the gradients. Gradients are summed by slices of the batch, and the slices in order: the bits
// of a result do not depend on the number of threads.
#include <cmath>
#include <cstring>
#include <exception>
#include <vector>

#include "features.h"
#include "problem.h"
#include "slices.h"

template <class S, int BYTES> class Attention : Features<S, BYTES> {
  using Base = Features<S, BYTES>;
  using typename Base::V;
  using Base::L, Base::attend, Base::products, Base::tanh;
  // At most 16 slices, each of 2^18 elements n T m d at least; what a block keeps, in bytes, is to
  // stay in the second cache, and what a call keeps for the next one is to be small.
  static constexpr long SLICES = 16, WORK = 1 << 18, CACHE = 1 << 18, KEPT = 1 << 26;

  struct Worker {  // work space of one thread
    V *p, *z, *pairs, *s, *features, *sigma, *factors;
    S *products, *q, *copies;
    Tokens<S> samples[SAMPLES];
    S g[SAMPLES];
  };
  struct Slice { V *c, *U, *W; };  // gradients, that of W in w = W q for a fixed query

  const Problem& P;
  const long n, T, d, m, tiles, size_W;
  const bool gradients, whole;  // whole: what all heads give is kept until f is known,
  const long held, B, slices, threads;  // among it the features of `held` tiles
  V *U, *W, *c, *direction, *Z, *C;  // W and Z, or gamma W q and gamma Z q for a fixed query
  S* q;
  std::vector<Worker> workers;
  std::vector<Slice> parts;

  size_t plan(char* base) {
    Layout memory{base};
    auto vectors = [&](long count) { return reinterpret_cast<V*>(memory.take(count * BYTES)); };
    auto numbers = [&](long count) { return reinterpret_cast<S*>(memory.take(count * sizeof(S))); };
    U = vectors(tiles * d), W = vectors(tiles * size_W), c = vectors(tiles), C = vectors(tiles);
    direction = vectors(P.V ? tiles * d : 0), Z = vectors(P.Z ? tiles * size_W : 0);
    q = numbers(d);
    for (Slice& part : parts)
      part.c = vectors(tiles), part.U = vectors(tiles * d), part.W = vectors(tiles * size_W);
    for (Worker& k : workers) {
      k.p = vectors(B * d), k.z = vectors(B * d), k.pairs = vectors(2 * TOKENS);
      k.s = vectors(B), k.features = vectors(held * B * 2 * d);
      k.sigma = vectors(whole ? tiles * B : 0), k.factors = vectors(B);
      k.products = numbers(whole ? tiles * L * B : 0), k.q = numbers(B * d);
      k.copies = numbers(P.mask ? B * T * d : 0);
    }
    return memory.used;
  }

  void pack_heads(const void* from, long size, V* to, double factor = 1) const {
    pack(static_cast<const S*>(from), m, size, L, S(factor), reinterpret_cast<S*>(to));
  }
  void unpack_heads(const V* from, long size, void* to) const {
    unpack(reinterpret_cast<const S*>(from), m, size, L, static_cast<S*>(to));
  }
  // A, or gamma A q for a fixed query.
  void pack_queries(const void* from, V* to, double factor = 1) const {
    if (P.per_sample || !from) return pack_heads(from, size_W, to, factor);
    std::vector<S> p(m * d);
    for (long i = 0; i < m * d; ++i)
      for (long l = 0; l < d; ++l) p[i] += static_cast<const S*>(from)[i * d + l] * q[l];
    pack_heads(p.data(), d, to, factor);
  }
  size_t bytes(long tile) const { return sizeof(S) * std::min(L, m - tile * L); }
  void put(void* array, long j, long tile, V value) const {
    std::memcpy(static_cast<S*>(array) + j * m + tile * L, &value, bytes(tile));
  }

  void gather(long j0, long b, Worker& k) const {  // kept tokens and scaled queries of a block
    for (long j = 0; j < b; ++j) {
      const S* x = static_cast<const S*>(P.tokens) + (j0 + j) * T * d;
      k.samples[j] = P.mask ? kept(x, P.mask + (j0 + j) * T, T, d, k.copies + j * T * d)
                            : Tokens<S>{x, T};
      for (long i = 0; P.per_sample && i < d; ++i)
        k.q[j * d + i] = S(P.scale) * static_cast<const S*>(P.query)[(j0 + j) * d + i];
    }
  }
  // gamma W q of a block.
  const V* head_queries(const V* from, long tile, long b, const Worker& k, V* to) const {
    if (!P.per_sample) return from + tile * d;
    products(from + tile * size_W, d, d, 1, k.q, d, 1, b, d,
             [&](long row, long j, V sum) { to[j * d + row] = sum; });
    return to;
  }
  // Features of a block of samples for one tile of heads, and what the mode makes of them.
  void heads(long tile, long j0, long b, Worker& k) const {
    V* features = k.features + (held > 1 ? tile * B * 2 * d : 0);
    const long step = P.per_sample ? d : 0;
    const V* p = head_queries(W, tile, b, k, k.p);
    const V* z = P.Z ? head_queries(Z, tile, b, k, k.z) : nullptr;
    const bool scores = P.mode == SCORES || P.mode == VALUES;
    attend(k.samples, b, d, p, step, U + tile * d, k.pairs, k.s, scores ? nullptr : features);
    for (long j = 0; j < b; ++j) {
      const V s = k.s[j], *a = features + j * 2 * d;
      if (whole) {
        const V sigma = tanh(s), product = c[tile] * sigma;
        k.sigma[tile * B + j] = sigma;
        std::memcpy(k.products + (j * tiles + tile) * L, &product, BYTES);
      } else if (P.mode == PULL) {
        k.factors[j] = V{};
        const S* given = static_cast<const S*>(P.given) + (j0 + j) * m + tile * L;
        std::memcpy(&k.factors[j], given, bytes(tile));
      } else if (P.mode == SUMS) {
        const V sigma = tanh(s), slope = c[tile] * (1 - sigma * sigma);
        const V value = C[tile] * sigma +
                        slope * Base::slope(a, direction + tile * d, z + j * step, d);
        if (tile == 0) P.sum[j0 + j] = P.squares[j0 + j] = 0;
        for (long i = 0; i < L; ++i)
          P.sum[j0 + j] += value[i], P.squares[j0 + j] += double(value[i]) * double(value[i]);
      } else {
        put(P.s, j0 + j, tile, s);
        if (P.mode == SLOPES)
          put(P.slope, j0 + j, tile, Base::slope(a, direction + tile * d, z + j * step, d));
        if (P.mode == FEATURES)
          for (long i = tile * L, at = ((j0 + j) * m + i) * d; i < std::min(m, tile * L + L); ++i)
            for (long l = 0; l < d; ++l, ++at)
              static_cast<S*>(P.a)[at] = a[l][i % L], static_cast<S*>(P.r)[at] = a[d + l][i % L];
      }
    }
  }

  void values(long j0, long b, Worker& k) const {  // f_j and g_j m^{-1/2}
    const S norm = 1 / std::sqrt(S(m));
    for (long j = 0; j < b; ++j) {
      S f = 0;
      if (P.mode != VJP)
        static_cast<S*>(P.f)[j0 + j] = f = norm * Base::pair_sum(k.products + j * tiles * L, m);
      if (!gradients) continue;
      const S given = static_cast<const S*>(P.given)[j0 + j];
      k.g[j] = norm * (P.mode == STEP ? 2 / S(n) * (f - given) : given);
    }
  }

  // What a block adds to the gradients of one tile: sum_j factor_j (a, r q^T), factor = g c sigma'.
  void pull(long tile, long b, Worker& k, const Slice& part) const {
    V *a = k.features + (held > 1 ? tile * B * 2 * d : 0), *r = a + d;
    V *grad_U = part.U + tile * d, *grad_W = part.W + tile * size_W;
    V in_c = {};
    for (long j = 0; whole && j < b; ++j) {
      const V sigma = k.sigma[tile * B + j];
      in_c += k.g[j] * sigma;
      k.factors[j] = k.g[j] * c[tile] * (1 - sigma * sigma);
    }
    part.c[tile] += in_c;
    for (long i = 0; i < d; ++i) {
      V in_U = {}, in_w = {};
      for (long j = 0; j < b; ++j) {
        in_U += k.factors[j] * a[j * 2 * d + i];
        in_w += r[j * 2 * d + i] *= k.factors[j];
      }
      grad_U[i] += in_U;
      if (!P.per_sample) grad_W[i] += in_w;
    }
    if (P.per_sample)
      products(r, 1, d, 2 * d, k.q, 1, d, d, b,
               [&](long row, long l, V sum) { grad_W[row * d + l] += sum; });
  }

  void slice(long index, Worker& k) const {
    if (gradients) std::fill(parts[index].c, parts[index].W + tiles * size_W, V{});
    for (long j = n * index / slices, last = n * (index + 1) / slices; j < last; j += B) {
      const long b = std::min(B, last - j);
      gather(j, b, k);
      for (long tile = 0; tile < tiles; ++tile) {
        heads(tile, j, b, k);
        if (P.mode == PULL) pull(tile, b, k, parts[index]);
      }
      if (!whole) continue;
      values(j, b, k);
      for (long tile = 0; gradients && tile < tiles; ++tile) pull(tile, b, k, parts[index]);
    }
  }

  void add_slices() const {
    const Slice& total = parts[0];
    for (size_t i = 1; i < parts.size(); ++i)
      for (long k = 0; k < total.W + tiles * size_W - total.c; ++k) total.c[k] += parts[i].c[k];
    if (P.grad_c) unpack_heads(total.c, 1, P.grad_c);
    unpack_heads(total.U, d, P.grad_U);
    if (P.per_sample) return unpack_heads(total.W, d * d, P.grad_W);
    std::vector<S> in_w(m * d);
    unpack_heads(total.W, d, in_w.data());
    for (long i = 0; i < m * d; ++i)
      for (long l = 0; l < d; ++l) static_cast<S*>(P.grad_W)[i * d + l] = in_w[i] * q[l];
  }

 public:
  explicit Attention(const Problem& problem)
      : P(problem), n(P.n), T(P.T), d(P.d), m(P.m), tiles((m + L - 1) / L),
        size_W(P.per_sample ? d * d : d), gradients(P.mode >= STEP),
        whole(P.mode >= VALUES && P.mode <= VJP), held(whole && gradients ? tiles : 1),
        B(std::clamp(CACHE / std::max(held * 2 * d * BYTES, T * d * long(sizeof(S))),
                     1L, SAMPLES)),
        slices(std::clamp(long(double(n) * T * m * d / WORK), 1L, std::min(n, SLICES))),
        threads(std::clamp(long(P.threads), 1L, slices)),
        workers(threads), parts(gradients ? slices : 0) {}

  void run() {
    static thread_local Memory memory;
    memory.reserve(plan(nullptr));
    plan(memory.base);
    for (long i = 0; i < d && !P.per_sample; ++i)
      q[i] = S(P.scale) * static_cast<const S*>(P.query)[i];
    pack_heads(P.U, d, U), pack_heads(P.c, 1, c), pack_heads(P.C, 1, C);
    pack_heads(P.V, d, direction), pack_queries(P.W, W, LOG2_E), pack_queries(P.Z, Z);
    run_slices(slices, workers, [&](long i, Worker& k) { slice(i, k); });
    if (gradients) add_slices();
    if (long(memory.size) > KEPT) memory.release();
  }
};

// Half the vector where that holds all heads: m = 8 does not fill 16 lanes.
template <class S> int run(const Problem* problem) try {
  constexpr int WIDE = LANES_BYTES, HALF = WIDE > 32 ? WIDE / 2 : WIDE;
  const bool half = problem->m * long(sizeof(S)) <= HALF;
  half ? Attention<S, HALF>(*problem).run() : Attention<S, WIDE>(*problem).run();
  return 0;
} catch (const std::exception&) {  // no memory, or more than there can be
  return 1;
}
extern "C" int attention_float(const Problem* problem) { return run<float>(problem); }
extern "C" int attention_double(const Problem* problem) { return run<double>(problem); }
