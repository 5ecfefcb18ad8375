// What eager torch does in several passes over a few numbers, in one pass each: norm, rope, and the gate of the mlp.
//
// A decode step of a small model runs hundreds of such operations, a few microseconds each, and their overhead adds up
// to more than their arithmetic. The plain torch versions in kernels.py are what these are tested against.
// All numbers are float32, row-major; `stride` is the distance of two rows, in numbers.

#include <cmath>
#include <cstdint>

#include "vector_math.h"

namespace {

// Rows go to several threads only where the work is worth waking them.
constexpr int64_t WORTH_A_THREAD = 32768;

// out[r][j] = x[r] . weight[j] for R rows and J rows of weights: R * J sums stay in registers, so that each number that
// is loaded is used several times.
template <int R, int J>
void dot_products(const float* x, int64_t x_stride, const float* weight, int64_t size, float* out, int64_t out_stride) {
    Vector sums[R][J] = {};
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) {
        Vector w[J];
        for (int j = 0; j < J; ++j) w[j] = load(weight + j * size + i);
        for (int r = 0; r < R; ++r) {
            const Vector xr = load(x + r * x_stride + i);
            for (int j = 0; j < J; ++j) sums[r][j] += xr * w[j];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < J; ++j) {
            float sum = 0;
            for (int lane = 0; lane < 8; ++lane) sum += sums[r][j][lane];
            for (int64_t rest = i; rest < size; ++rest) sum += x[r * x_stride + rest] * weight[j * size + rest];
            out[r * out_stride + j] = sum;
        }
}

template <int J>
void dot_products_of_rows(const float* x, int64_t x_stride, const float* weight, int64_t T, int64_t size, float* out,
                          int64_t out_stride) {
    int64_t t = 0;
    for (; t + 3 <= T; t += 3) dot_products<3, J>(x + t * x_stride, x_stride, weight, size, out + t * out_stride, out_stride);
    for (; t < T; ++t) dot_products<1, J>(x + t * x_stride, x_stride, weight, size, out + t * out_stride, out_stride);
}

}  // namespace

extern "C" {

// out[t][j] = x[t] . weight[j]; x: [T, size], weight: [outputs, size], out: [T, outputs]. Made for few rows: the weights
// are read once, in their own order.
void linear(const float* x, int64_t stride, const float* weight, float* out, int64_t T, int64_t size, int64_t outputs,
            int threads) {
    const int64_t tiles = (outputs + 3) / 4;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t j = tile * 4;
        const float* w = weight + j * size;
        if (j + 4 <= outputs)
            dot_products_of_rows<4>(x, stride, w, T, size, out + j, outputs);
        else
            for (int64_t k = j; k < outputs; ++k)
                dot_products_of_rows<1>(x, stride, weight + k * size, T, size, out + k, outputs);
    }
}

// out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight; x, out: [T, size]
void rms_norm(const float* x, int64_t stride, const float* weight, float* out, int64_t out_stride, int64_t T,
              int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (T * size >= WORTH_A_THREAD)
    for (int64_t t = 0; t < T; ++t) {
        const float* row = x + t * stride;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; ++i) sum += row[i] * row[i];
        const float scale = 1 / std::sqrt(sum / size + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) out[t * out_stride + i] = row[i] * scale * weight[i];
    }
}

// Turn each pair (i, i + D/2) of the first `heads` heads of each row, in place; x: [T, heads, D], cos, sin: [T, D]
// with the first half of sin negated, as in rope.py.
void rotate(float* x, int64_t stride, const float* cos, const float* sin, int64_t T, int64_t heads, int64_t D,
            int threads) {
    const int64_t half = D / 2;
#pragma omp parallel for num_threads(threads) if (T * heads * D >= WORTH_A_THREAD)
    for (int64_t t = 0; t < T; ++t) {
        const float *c = cos + t * D, *s = sin + t * D;
        for (int64_t head = 0; head < heads; ++head) {
            float *low = x + t * stride + head * D, *high = low + half;
#pragma omp simd
            for (int64_t i = 0; i < half; ++i) {
                const float a = low[i], b = high[i];
                low[i] = a * c[i] + b * s[i];
                high[i] = b * c[i + half] + a * s[i + half];
            }
        }
    }
}

// out[t] = silu(gate[t]) * up[t], silu(x) = x / (1 + exp(-x)); gate_up: [T, 2 * size], out: [T, size]
void silu_mul(const float* gate_up, float* out, int64_t T, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (T * size >= WORTH_A_THREAD)
    for (int64_t t = 0; t < T; ++t) {
        const float *gate = gate_up + t * 2 * size, *up = gate + size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) out[t * size + i] = gate[i] / (1 + exponential(-gate[i])) * up[i];
    }
}

}  // extern "C"
