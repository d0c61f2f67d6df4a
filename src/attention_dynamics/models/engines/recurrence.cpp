// Independent recurrent units: values, and back-propagation through time in closed form.
//
//   h_t = tanh(z_t), z_t = w x_t + u h_{t-1},   f_j = sum_i c_i h_{i,T}  (c holds the m^{-1/2}),
//   delta_T = g_j c tanh'(z_T),                 delta_{t-1} = delta_t u tanh'(z_{t-1}),
//   dw = sum_{j,t} delta_t x_t^T,               du = sum_{j,t} delta_t h_{t-1},
//   dc = sum_j g_j h_T,                         g_j = (2/n) (f_j - y_j).
//
// A lane of a vector is a unit. ROWS samples times COLUMNS vectors of units make a tile: as many
// chains of h in flight hide the latency of tanh, and w x_t is formed in registers when a chain
// needs it. The states are kept for the way back. A sequence too long for the memory allowed is
// cut, the states at the cuts kept, and the steps between cuts computed once more. Samples are
// dealt to a fixed number of slices, summed in order: no bit depends on the number of threads.
//
// Where x_t is d numbers and P more that are the same in every sample, its place, what the place
// adds to z_t is formed once a call, and delta_t is summed over the samples before it meets it.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <vector>

#include "recurrent_lanes.h"

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num() { return 0; }
#endif

namespace {
constexpr int64_t SLICES = 32, KEPT_BYTES = 4 << 20, SHORTEST_CUT = 64;

template <class Real> struct Problem {
    const Real *tokens, *targets;
    int64_t n, T, d, P, tiles, cut, cuts;
    const Column<Real>* parameters;  // a tile after another: w, one column a coordinate, u, c
    const Column<Real>* drive;       // w p_t, (tiles, T), or null
    int64_t width() const { return d + P + 2; }
    int64_t size() const { return width() + (drive ? T : 0); }  // sums of a tile: those of
};  // delta_t over the samples follow the gradients
template <class Real> struct Memory {  // of one thread; back = df/dh
    std::vector<Tile<Real>> states, at_cut, back;  // [tile, step], [tile, cut], [tile]
};

// From h[0] to h[steps * stride]; with stride 0 only the last state stays.
template <class Real>
void forward(const Problem<Real>& p, int64_t tile, const Rows<Real>& x, int64_t first, int64_t last,
             Tile<Real>* h, int64_t stride) {
    const int64_t d = p.d;
    const Column<Real>*w = p.parameters + tile * p.width(), &u = w[d + p.P];
    for (int64_t t = first; t < last; ++t, h += stride) {
        Vector<Real> z[CHAINS] = {};
        for (int k = 0; p.drive && k < CHAINS; ++k) z[k] = p.drive[tile * p.T + t].at[k % COLUMNS];
        for (int64_t i = 0; i < d; ++i)
            for (int k = 0; k < CHAINS; ++k)
                z[k] += w[i].at[k % COLUMNS] * x[k / COLUMNS][t * d + i];
        for (int k = 0; k < CHAINS; ++k) z[k] += u.at[k % COLUMNS] * h->at[k];
        for (int k = 0; k < CHAINS; k += GROUP) hyperbolic_tangent<Real>(z + k, h[stride].at + k);
    }
}

// dw[K coordinates] += delta_t x_t^T over the steps, the sums held in registers.
template <class Real, int K>
void outer(const Rows<Real>& x, int64_t offset, int64_t steps, int64_t d, const Tile<Real>* delta,
           Column<Real>* dw) {
    constexpr int CHAIN = K > 2 ? 1 : ROWS;  // few sums are waited for, unless each row has its own
    Vector<Real> sum[CHAIN][K * COLUMNS] = {};
    for (int64_t t = 0; t < steps; ++t)
        for (int row = 0; row < ROWS; ++row)
            for (int i = 0; i < K * COLUMNS; ++i)
                sum[row % CHAIN][i] += delta[t].at[row * COLUMNS + i % COLUMNS] *
                                       x[row][offset + t * d + i / COLUMNS];
    for (const auto& part : sum)
        for (int i = 0; i < K * COLUMNS; ++i) dw[i / COLUMNS].at[i % COLUMNS] += part[i];
}

// ``back`` is df/dh after the steps, and before them on return; h[1...] is overwritten by delta.
// The copies are loops, since a struct would be copied by pieces of 16 bytes.
template <class Real>
void backward(const Problem<Real>& p, int64_t tile, const Rows<Real>& x, int64_t first,
              int64_t last, Tile<Real>* h, Tile<Real>& back, Column<Real>* sums) {
    Vector<Real> gradient[CHAINS], sum[COLUMNS] = {};
    const Column<Real>& u = p.parameters[tile * p.width() + p.d + p.P];
    for (int k = 0; k < CHAINS; ++k) gradient[k] = back.at[k];
    for (int64_t t = last - first; t > 0; --t) {
        Vector<Real> in_drive[COLUMNS] = {};
        for (int k = 0; k < CHAINS; ++k) {
            const auto delta = gradient[k] * (Real(1) - h[t].at[k] * h[t].at[k]);
            h[t].at[k] = delta;
            sum[k % COLUMNS] += delta * h[t - 1].at[k];
            in_drive[k % COLUMNS] += delta;
            gradient[k] = delta * u.at[k % COLUMNS];
        }
        for (int k = 0; p.drive && k < COLUMNS; ++k)
            sums[p.width() + first + t - 1].at[k] += in_drive[k];
    }
    for (int k = 0; k < CHAINS; ++k) back.at[k] = gradient[k];
    for (int k = 0; k < COLUMNS; ++k) sums[p.d + p.P].at[k] += sum[k];
    constexpr decltype(&outer<Real, 1>) OUTER[] = {outer<Real, 1>, outer<Real, 2>, outer<Real, 3>,
                                                   outer<Real, 4>, outer<Real, 5>, outer<Real, 6>};
    const int64_t parts = (p.d + 5) / 6;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t i = part * p.d / parts, K = (part + 1) * p.d / parts - i;
        OUTER[K - 1](x, first * p.d + i, last - first, p.d, h + 1, sums + i);
    }
}

// ROWS samples from ``first``; rows past the end repeat the last sample with g = 0.
template <class Real>
void block(const Problem<Real>& p, int64_t first, Memory<Real>& memory, Column<Real>* sums,
           Real* values) {
    Rows<Real> x;
    for (int row = 0; row < ROWS; ++row)
        x[row] = p.tokens + std::min(first + row, p.n - 1) * p.T * p.d;
    const int64_t stride = p.targets ? 1 : 0, size = p.cut * stride + 1;
    const int64_t last_cut = (p.cuts - 1) * p.cut, end = (p.T - last_cut) * stride;
    Tile<Real> f;
    for (int64_t tile = 0; tile < p.tiles; ++tile) {
        Tile<Real>* h = &memory.states[tile * size];
        h[0] = Tile<Real>{};
        for (int64_t k = 0; k < p.cuts - 1; ++k) {
            memory.at_cut[tile * p.cuts + k] = h[0];
            forward(p, tile, x, k * p.cut, (k + 1) * p.cut, h, 0);
        }
        forward(p, tile, x, last_cut, p.T, h, stride);
        const Column<Real> c = p.parameters[(tile + 1) * p.width() - 1];
        for (int k = 0; k < CHAINS; ++k) f.at[k] += c.at[k % COLUMNS] * h[end].at[k];
    }
    Real g[ROWS] = {};
    for (int row = 0; row < ROWS && first + row < p.n; ++row) {
        Real sum = 0;
        for (int k = row * COLUMNS; k < (row + 1) * COLUMNS; ++k)
            for (size_t i = 0; i < BYTES / sizeof(Real); ++i) sum += f.at[k][i];
        values[first + row] = sum;
        if (p.targets) g[row] = 2 * (sum - p.targets[first + row]) / p.n;
    }
    if (!p.targets) return;
    for (int64_t k = p.cuts - 1; k >= 0; --k)
        for (int64_t tile = 0; tile < p.tiles; ++tile) {
            Tile<Real>*h = &memory.states[tile * size], &back = memory.back[tile];
            Column<Real>* sum = sums + tile * p.size();
            const int64_t start = k * p.cut, stop = std::min(start + p.cut, p.T);
            if (k < p.cuts - 1) {
                h[0] = memory.at_cut[tile * p.cuts + k];
                forward(p, tile, x, start, stop, h, 1);
            }
            for (int i = 0; i < CHAINS && k == p.cuts - 1; ++i) {
                sum[p.width() - 1].at[i % COLUMNS] += g[i / COLUMNS] * h[end].at[i];
                const auto c = p.parameters[(tile + 1) * p.width() - 1].at[i % COLUMNS];
                back.at[i] = g[i / COLUMNS] * c;
            }
            backward(p, tile, x, start, stop, h, back, sum);
        }
}

template <class Real>
int run(const void* parameters, const void* tokens, const void* places, const void* targets,
        int64_t n, int64_t T, int64_t d, int64_t P, int64_t tiles, int threads, void* values,
        void* gradients) try {
    const int64_t fits = std::max<int64_t>(SHORTEST_CUT, KEPT_BYTES / (tiles * sizeof(Tile<Real>)));
    const int64_t cut = targets ? std::min(T, fits) : T, cuts = (T + cut - 1) / cut;
    std::vector<Column<Real>> drive(P ? tiles * T : 0);
    const Problem<Real> p{(const Real*)tokens, (const Real*)targets, n, T, d, P, tiles, cut, cuts,
                          (const Column<Real>*)parameters, P ? drive.data() : nullptr};
    const int64_t width = p.width(), size = tiles * p.size();
    const Real* place = (const Real*)places;
    // f(tile and step, coordinate of the place, column, number)
    const auto over_places = [&](auto&& f) {
        for (int64_t i = 0; i < int64_t(drive.size()); ++i)
            for (int64_t l = 0; l < P; ++l)
                for (int k = 0; k < COLUMNS; ++k) f(i / T, i % T, d + l, k, place[i % T * P + l]);
    };
    over_places([&](int64_t tile, int64_t t, int64_t row, int k, Real number) {
        drive[tile * T + t].at[k] += p.parameters[tile * width + row].at[k] * number;
    });
    const int64_t blocks = (n + ROWS - 1) / ROWS, slices = std::min(SLICES, blocks);
    const int workers = int(std::max<int64_t>(1, std::min<int64_t>(threads, slices)));
    std::vector<Memory<Real>> memory(workers);
    for (auto& [states, at_cut, back] : memory)
        states.resize(tiles * (targets ? cut + 1 : 1)), at_cut.resize(tiles * cuts),
            back.resize(tiles);
    std::vector<Column<Real>> sums(targets ? slices * size : 0);
#pragma omp parallel for num_threads(workers) schedule(dynamic)
    for (int64_t slice = 0; slice < slices; ++slice)
        for (int64_t k = slice * blocks / slices; k < (slice + 1) * blocks / slices; ++k)
            block(p, k * ROWS, memory[omp_get_thread_num()], sums.data() + slice * size,
                  (Real*)values);
    if (!targets) return 0;
    for (int64_t i = size; i < int64_t(sums.size()); ++i)
        for (int col = 0; col < COLUMNS; ++col) sums[i % size].at[col] += sums[i].at[col];
    over_places([&](int64_t tile, int64_t t, int64_t row, int k, Real number) {
        Column<Real>* of = sums.data() + tile * p.size();
        of[row].at[k] += of[width + t].at[k] * number;
    });
    for (int64_t tile = 0; tile < tiles; ++tile)
        std::copy_n(&sums[tile * p.size()], width, (Column<Real>*)gradients + tile * width);
    return 0;
} catch (const std::exception&) {  // no memory, or more than there can be
    return 1;
}

}  // namespace

extern "C" {
int recurrence_units(int bytes) { return COLUMNS * BYTES / bytes; }  // of a tile

// parameters, gradients: (tiles, d + P + 2, units), 64-byte aligned, lanes past the last unit zero.
// tokens (n, T, d); places (T, P); targets (n), or null for values (n) alone. 1 when memory ran
// out, else 0.
int recurrence(int bytes, const void* parameters, const void* tokens, const void* places,
               const void* targets, int64_t n, int64_t T, int64_t d, int64_t P, int64_t tiles,
               int threads, void* values, void* gradients) {
    return (bytes == 4 ? run<float> : run<double>)(parameters, tokens, places, targets, n, T, d, P,
                                                   tiles, threads, values, gradients);
}
}
