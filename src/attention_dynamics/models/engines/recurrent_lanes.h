// Vectors of units, one unit a lane: tiles of them, and tanh for a group at once.
#pragma once
#include <cstdint>

#ifdef BYTES  // of a vector: a test asks for more than the processor has
#elif defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX2__)
#define BYTES 32
#else
#define BYTES 16
#endif

namespace {
constexpr int ROWS = BYTES == 64 ? 8 : 4, COLUMNS = 2, CHAINS = ROWS * COLUMNS;  // by registers
constexpr int GROUP = 8;  // evaluations of tanh that keep both multipliers busy
// Q is the minimax polynomial of (2^r - 1) / r on |r| <= 1/2, highest power first, to 1.1e-8 and
// 1.8e-17. A number x + ROUND has round(x) + bias in its low bits, x >= LOWEST = -bias.
template <class Real> struct Lanes;
template <> struct Lanes<float> {
    typedef float V __attribute__((vector_size(BYTES)));
    typedef uint32_t Bits __attribute__((vector_size(BYTES)));
    static constexpr int TERMS = 6, MANTISSA = 23;
    static constexpr float ROUND = 12582912.f + 127.f, LOWEST = -127.f;
    static constexpr float Q[] = {1.54035316156e-4f, 1.33907355457e-3f, 9.61823745421e-3f,
                                  5.55035743454e-2f, 0.24022649795f,    0.693147187926f};
};
template <> struct Lanes<double> {
    typedef double V __attribute__((vector_size(BYTES)));
    typedef uint64_t Bits __attribute__((vector_size(BYTES)));
    static constexpr int TERMS = 11, MANTISSA = 52;
    static constexpr double ROUND = 6755399441055744. + 1023., LOWEST = -1023.;
    static constexpr double Q[] = {
        4.4455375355511690213e-10, 7.0725621169673249131e-9, 1.0178121302447323307e-7,
        1.3215442722277882267e-6,  1.5252733701194614884e-5, 1.5403530441483656758e-4,
        1.333355814653166425e-3,   9.618129107607064039e-3,  5.5504108664821236384e-2,
        0.24022650695910097891,    0.6931471805599453112};
};
template <class Real> using Vector = typename Lanes<Real>::V;
template <class Real> struct Column {
    Vector<Real> at[COLUMNS] = {};
};
template <class Real> struct Tile {  // chain i: sample i / COLUMNS, vector i % COLUMNS of the units
    Vector<Real> at[CHAINS] = {};
};
template <class Real> using Rows = const Real* [ROWS];

// y = tanh x = -sign(x) e / (e + 2), e = exp(-2|x|) - 1 = 2^k (1 + p) - 1: small in relative error
// for every x, odd to the last bit, exactly 1 when saturated; a NaN stays. A step is written for
// the whole GROUP before the next: no processor looks ahead far enough to interleave eight tanh.
template <class Real> inline void hyperbolic_tangent(const Vector<Real>* x, Vector<Real>* y) {
    using L = Lanes<Real>;
    using Bits = typename L::Bits;
    const Bits sign = (Bits)-Vector<Real>{};
    Vector<Real> r[GROUP], p[GROUP], power[GROUP], lowest = Vector<Real>{} + L::LOWEST;
    for (int i = 0; i < GROUP; ++i) {
        r[i] = (Vector<Real>)((Bits)x[i] | sign) * Real(2.88539008177792681472);  // 2 / log(2)
        r[i] = lowest > r[i] ? lowest : r[i];
        power[i] = r[i] + L::ROUND;
        p[i] = Vector<Real>{} + L::Q[0];
    }
    for (int i = 0; i < GROUP; ++i) r[i] -= power[i] - L::ROUND;
#pragma GCC unroll 16
    for (int term = 1; term < L::TERMS; ++term)
        for (int i = 0; i < GROUP; ++i) p[i] = p[i] * r[i] + L::Q[term];
    for (int i = 0; i < GROUP; ++i) power[i] = (Vector<Real>)((Bits)power[i] << L::MANTISSA);
    for (int i = 0; i < GROUP; ++i) p[i] = power[i] * (p[i] * r[i]) + (power[i] - Real(1));
    for (int i = 0; i < GROUP; ++i) r[i] = p[i] / (p[i] + Real(2));
    for (int i = 0; i < GROUP; ++i)
        y[i] = (Vector<Real>)(((Bits)r[i] & ~sign) | ((Bits)x[i] & sign));
}
}  // namespace
