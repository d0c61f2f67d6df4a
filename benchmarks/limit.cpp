// What one core can do at best: multiply-adds and exponentials held in registers, and copies.
//
// The same instructions as in a training step, with nothing to load and nothing to wait for.

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int lanes = 16;
#elif defined(__AVX2__)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif

typedef float floats __attribute__((vector_size(4 * lanes)));
typedef int32_t ints __attribute__((vector_size(4 * lanes)));

constexpr int chains = 12;  // enough independent multiply-adds to hide their latency

static inline floats filled(float value) { return value - floats{}; }

// e^x for |x| < 80: x = k log 2 + rest, 2^k by the exponent bits, e^rest by a polynomial.
static inline floats exponential(floats x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const floats shifted = x * 1.44269504f + shift;
  const floats k = shifted - shift;
  const floats rest = (x - k * 0.693359375f) + k * 2.12194440e-4f;
  floats p = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * rest + 8.3334519073e-3f;
  p = p * rest + 4.1665795894e-2f;
  p = p * rest + 1.6666665459e-1f;
  p = p * rest + 5.0000001201e-1f;
  p = p * rest * rest + rest + 1.0f;
  return (floats)((ints)p + ((ints)shifted << 23));
}

extern "C" {

int lane_count() { return lanes; }

// At least ``flops`` floating-point operations, a multiply-add counting as two.
float multiply_add(double flops) {
  floats chain[chains];
  for (int i = 0; i < chains; ++i) chain[i] = filled(0.5f + 0.01f * i);
  const floats factor = filled(0.999f), term = filled(0.0005f);
  const int64_t rounds = (int64_t)(flops / (2.0 * lanes * chains)) + 1;
  for (int64_t k = 0; k < rounds; ++k)
#pragma GCC unroll 12
    for (int i = 0; i < chains; ++i) chain[i] = chain[i] * factor + term;
  floats sum = chain[0];
  for (int i = 1; i < chains; ++i) sum += chain[i];
  return sum[0];
}

// At least ``count`` exponentials of numbers in (-2, 0].
float exponentials(double count) {
  floats a = filled(-0.25f), b = filled(-0.5f), c = filled(-1.0f), d = filled(-1.5f), last = a;
  const int64_t rounds = (int64_t)(count / (4.0 * lanes)) + 1;
  for (int64_t k = 0; k < rounds; ++k) {
    asm volatile("" : "+x"(a), "+x"(b), "+x"(c), "+x"(d));  // unknown again in every round
    floats e = exponential(a), f = exponential(b), g = exponential(c), h = exponential(d);
    asm volatile("" : "+x"(e), "+x"(f), "+x"(g), "+x"(h));  // and each one is needed
    last = e;
  }
  return last[0];
}

void copy(void *to, const void *from, int64_t bytes) { std::memcpy(to, from, bytes); }
}
