// Products of float32 rows with weights of 8 or 4 bits, in whole numbers: x is quantised on the way in, a group of 32
// numbers at a time, and each group's sum of products, exact in int32, is scaled and added in float32.
//
// The weights lie in tiles of 16 outputs, so that one pass over memory in order feeds two registers of 8 outputs:
//
//     tile (16 outputs) -> group (32 columns) -> step k (4 columns) -> half (8 outputs) -> output -> 4 columns
//
// 8 bits: 1 to 127, 64 stands for 0. 4 bits: 0 to 15, the low half of a byte for outputs 0 to 7 of the tile, the high
// half for 8 to 15, with scale and minimum of each group in 16-bit floats, as they were published. AVX2 multiplies bytes in pairs and adds the two in 16 bits, saturating (vpmaddubsw). Both fit:
// 2 * 127 * 127 = 32258 is below 2^15, and of 4 bits even eight pairs, 8 * 2 * 15 * 127 = 30480, are.
//
// A row's result depends on nothing but the row: its sums are made in the same order, however many rows there are.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define VECTORS 1
#endif

namespace {

constexpr int GROUP = 32;    // columns that share a scale
constexpr int TILE = 16;     // outputs
constexpr int STEPS = GROUP / 4;
constexpr int ROWS = 4;      // of x: with two registers of sums each, everything stays in the 16 that there are
constexpr int ROW_BLOCK = 64;
constexpr int OFFSET = 64;   // of 8-bit weights
constexpr int64_t WORTH_A_THREAD = 1 << 15;  // numbers to quantise

typedef uint16_t Half;  // the bits of a 16-bit float

// x as whole numbers of -127 to 127: x = scale * value.
struct Activations {
    int64_t groups;
    std::vector<int8_t> values;  // [T, groups * 32]
    std::vector<float> scales;   // [T, groups]
    std::vector<int32_t> sums;   // [T, groups], of the values
};

// One group of `count` numbers, the rest of it zeros. A count that the compiler knows makes vector instructions of it.
inline void quantise_group(const float* x, int64_t count, int8_t* values, float& scale, int32_t& sum) {
    float largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
    const float inverse = largest > 0 ? 127 / largest : 0;
    int32_t whole[GROUP] = {};
    for (int64_t i = 0; i < count; ++i) whole[i] = static_cast<int32_t>(std::nearbyint(x[i] * inverse));
    sum = 0;
    for (int64_t i = 0; i < GROUP; ++i) sum += whole[i];
    for (int64_t i = 0; i < GROUP; ++i) values[i] = static_cast<int8_t>(whole[i]);
    scale = largest / 127;
}

void quantise_row(const float* x, int64_t size, int64_t groups, int8_t* values, float* scales, int32_t* sums) {
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t start = g * GROUP;
        if (start + GROUP <= size)
            quantise_group(x + start, GROUP, values + start, scales[g], sums[g]);
        else
            quantise_group(x + start, size - start, values + start, scales[g], sums[g]);
    }
}

void quantise(const float* x, int64_t stride, int64_t T, int64_t size, Activations& a, int threads) {
    a.groups = (size + GROUP - 1) / GROUP;
    a.values.resize(T * a.groups * GROUP);
    a.scales.resize(T * a.groups);
    a.sums.resize(T * a.groups);
#pragma omp parallel for num_threads(threads) if (T * size >= WORTH_A_THREAD)
    for (int64_t t = 0; t < T; ++t)
        quantise_row(x + t * stride, size, a.groups, &a.values[t * a.groups * GROUP], &a.scales[t * a.groups],
                     &a.sums[t * a.groups]);
}

#ifdef VECTORS

// Four columns of 8 outputs with four of one row: sums += w[o][0..3] . x[0..3]
inline __m256i dot4(__m256i sums, __m256i w, __m256i x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpbusd_epi32(sums, w, x);
#elif defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sums, w, x);
#else
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
#endif
}

inline __m256 eight_halves(const Half* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline __m256i four_of(const int8_t* x) {
    int32_t bits;
    std::memcpy(&bits, x, 4);
    return _mm256_set1_epi32(bits);
}

// One tile for R rows, 8 bits.
template <int R>
void tile_int8(const Activations& a, int64_t row, const uint8_t* weights, const float* scales, float* out) {
    const int64_t width = a.groups * GROUP;
    __m256 total[R][2];
    for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < a.groups; ++g) {
        __m256i sums[R][2];
        for (int r = 0; r < R; ++r)  // the offset of the weights, taken off beforehand
            sums[r][0] = sums[r][1] = _mm256_set1_epi32(-OFFSET * a.sums[(row + r) * a.groups + g]);
        const uint8_t* w = weights + g * GROUP * TILE;
        const int8_t* x = &a.values[row * width + g * GROUP];
        for (int k = 0; k < STEPS; ++k) {
            const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + k * 64));
            const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + k * 64 + 32));
            for (int r = 0; r < R; ++r) {
                const __m256i four = four_of(x + r * width + 4 * k);
                sums[r][0] = dot4(sums[r][0], low, four);
                sums[r][1] = dot4(sums[r][1], high, four);
            }
        }
        const __m256 scale[2] = {_mm256_loadu_ps(scales + g * TILE), _mm256_loadu_ps(scales + g * TILE + 8)};
        for (int r = 0; r < R; ++r) {
            const __m256 of_row = _mm256_set1_ps(a.scales[(row + r) * a.groups + g]);
            for (int h = 0; h < 2; ++h)
                total[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][h]), _mm256_mul_ps(scale[h], of_row), total[r][h]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h) _mm256_storeu_ps(out + r * TILE + 8 * h, total[r][h]);
}

// One tile for R rows, 4 bits with a minimum: scale * (q . x) + minimum * (1 . x).
template <int R>
void tile_int4(const Activations& a, int64_t row, const uint8_t* weights, const Half* scales, const Half* minima,
               float* out) {
    const int64_t width = a.groups * GROUP;
    const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256 total[R][2];
    for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < a.groups; ++g) {
        __m256i sums[R][2];  // in 16 bits, which a group never fills
        for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
        const uint8_t* w = weights + g * GROUP * TILE / 2;
        const int8_t* x = &a.values[row * width + g * GROUP];
        for (int k = 0; k < STEPS; ++k) {
            const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + k * 32));
            const __m256i low = _mm256_and_si256(both, nibble);
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
            for (int r = 0; r < R; ++r) {
                const __m256i four = four_of(x + r * width + 4 * k);
                sums[r][0] = _mm256_add_epi16(sums[r][0], _mm256_maddubs_epi16(low, four));
                sums[r][1] = _mm256_add_epi16(sums[r][1], _mm256_maddubs_epi16(high, four));
            }
        }
        __m256 scale[2], minimum[2];
        for (int h = 0; h < 2; ++h) {
            scale[h] = eight_halves(scales + g * TILE + 8 * h);
            minimum[h] = eight_halves(minima + g * TILE + 8 * h);
        }
        for (int r = 0; r < R; ++r) {
            const int64_t at = (row + r) * a.groups + g;
            const __m256 of_row = _mm256_set1_ps(a.scales[at]), of_sum = _mm256_set1_ps(a.scales[at] * a.sums[at]);
            for (int h = 0; h < 2; ++h) {
                const __m256 whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(sums[r][h], ones));
                total[r][h] = _mm256_fmadd_ps(whole, _mm256_mul_ps(scale[h], of_row), total[r][h]);
                total[r][h] = _mm256_fmadd_ps(minimum[h], of_sum, total[r][h]);
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h) _mm256_storeu_ps(out + r * TILE + 8 * h, total[r][h]);
}

#else

// The same numbers for any processor, one after the other.

// A 16-bit float has 5 bits of exponent and 10 of fraction: moved into a float's places, it is 2^112 times too small.
inline float number(Half half) {
    const uint32_t bits = static_cast<uint32_t>(half & 0x7fff) << 13;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return (half & 0x8000 ? -value : value) * 5.192296858534828e33f;
}

template <int R>
void tile_int8(const Activations& a, int64_t row, const uint8_t* weights, const float* scales, float* out) {
    for (int r = 0; r < R; ++r)
        for (int o = 0; o < TILE; ++o) {
            float total = 0;
            for (int64_t g = 0; g < a.groups; ++g) {
                const int64_t at = (row + r) * a.groups + g;
                int32_t sum = -OFFSET * a.sums[at];
                for (int i = 0; i < GROUP; ++i)
                    sum += a.values[at * GROUP + i] * weights[g * GROUP * TILE + i / 4 * 64 + o * 4 + i % 4];
                total = std::fma(static_cast<float>(sum), scales[g * TILE + o] * a.scales[at], total);
            }
            out[r * TILE + o] = total;
        }
}

template <int R>
void tile_int4(const Activations& a, int64_t row, const uint8_t* weights, const Half* scales, const Half* minima,
               float* out) {
    for (int r = 0; r < R; ++r)
        for (int o = 0; o < TILE; ++o) {
            float total = 0;
            for (int64_t g = 0; g < a.groups; ++g) {
                const int64_t at = (row + r) * a.groups + g;
                int32_t sum = 0;
                for (int i = 0; i < GROUP; ++i) {
                    const uint8_t both = weights[g * GROUP * TILE / 2 + i / 4 * 32 + o % 8 * 4 + i % 4];
                    sum += a.values[at * GROUP + i] * (o < 8 ? both & 15 : both >> 4);
                }
                total = std::fma(static_cast<float>(sum), number(scales[g * TILE + o]) * a.scales[at], total);
                total = std::fma(number(minima[g * TILE + o]), a.scales[at] * a.sums[at], total);
            }
            out[r * TILE + o] = total;
        }
}

#endif

template <typename Scale, int R>
void rows_of_tile(const Activations& a, int64_t row, const uint8_t* weights, const Scale* scales, const Scale* minima,
                  const float* bias, float* out, int64_t outputs, int64_t first) {
    float result[R * TILE];
    if constexpr (sizeof(Scale) == sizeof(Half))
        tile_int4<R>(a, row, weights, scales, minima, result);
    else
        tile_int8<R>(a, row, weights, scales, result);
    const int64_t count = std::min<int64_t>(TILE, outputs - first);
    for (int r = 0; r < R; ++r)
        for (int64_t o = 0; o < count; ++o)
            out[(row + r) * outputs + first + o] = result[r * TILE + o] + (bias ? bias[first + o] : 0);
}

template <typename Scale>
void product(const float* x, int64_t stride, const uint8_t* weights, const Scale* scales, const Scale* minima,
             const float* bias, float* out, int64_t T, int64_t size, int64_t outputs, int threads) {
    thread_local Activations a;  // its memory is used again by the next call
    quantise(x, stride, T, size, a, threads);
    const Activations& shared = a;
    const int64_t tiles = (outputs + TILE - 1) / TILE, blocks = (T + ROW_BLOCK - 1) / ROW_BLOCK;
    const int64_t bytes = shared.groups * GROUP * TILE / (minima ? 2 : 1), numbers = shared.groups * TILE;
    // A block of rows stays in a core's cache while all weights pass by it.
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
    for (int64_t block = 0; block < blocks; ++block)
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const uint8_t* w = weights + tile * bytes;
            const Scale *s = scales + tile * numbers, *m = minima ? minima + tile * numbers : nullptr;
            int64_t row = block * ROW_BLOCK;
            const int64_t end = std::min(T, row + ROW_BLOCK), first = tile * TILE;
            for (; row + ROWS <= end; row += ROWS)
                rows_of_tile<Scale, ROWS>(shared, row, w, s, m, bias, out, outputs, first);
            if (end - row == 3) rows_of_tile<Scale, 3>(shared, row, w, s, m, bias, out, outputs, first);
            if (end - row == 2) rows_of_tile<Scale, 2>(shared, row, w, s, m, bias, out, outputs, first);
            if (end - row == 1) rows_of_tile<Scale, 1>(shared, row, w, s, m, bias, out, outputs, first);
        }
}

}  // namespace

extern "C" {

// out[t][j] = x[t] . weight[j] + bias[j]; x [T, size] with `stride` between rows, out [T, outputs]. bias may be null.
void linear_int8(const float* x, int64_t stride, const uint8_t* weights, const float* scales, const float* bias,
                 float* out, int64_t T, int64_t size, int64_t outputs, int threads) {
    product<float>(x, stride, weights, scales, nullptr, bias, out, T, size, outputs, threads);
}

void linear_int4(const float* x, int64_t stride, const uint8_t* weights, const Half* scales, const Half* minima,
                 const float* bias, float* out, int64_t T, int64_t size, int64_t outputs, int threads) {
    product<Half>(x, stride, weights, scales, minima, bias, out, T, size, outputs, threads);
}

}  // extern "C"
