// Products of float32 rows with weights of 8 or 4 bits, in whole numbers: x is quantised on the way in, a group of 32
// numbers at a time, and each group's sum of products, exact in int32, is scaled and added in float32.
//
// The weights lie in tiles of 16 outputs, so that one pass over memory in order feeds two registers of 8 outputs, or one
// of 16:
//
//     tile (16 outputs) -> group (32 columns) -> step (4 columns) -> half (8 outputs) -> output -> 4 columns
//
// 8 bits: 1 to 127, 64 stands for 0. 4 bits: 0 to 15, the low half of a byte for outputs 0 to 7 of the tile, the high
// half for 8 to 15, with scale and minimum of each group in 16-bit floats, as they were published.
//
// AVX-512 with VNNI multiplies bytes four by four and adds in 32 bits (vpdpbusd). AVX2 multiplies them in pairs and adds
// the two in 16 bits, saturating (vpmaddubsw). Both fit: 2 * 127 * 127 = 32258 is below 2^15, and of 4 bits even a
// group's eight pairs, 8 * 2 * 15 * 127 = 30480, are.
//
// A row's result depends on nothing but the row: its sums are made in the same order, however many rows there are.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int GROUP = 32;  // columns that share a scale
constexpr int TILE = 16;   // outputs
constexpr int STEPS = GROUP / 4;
constexpr int ROW_BLOCK = 128;  // stay in a core's cache while all weights pass by
constexpr int OFFSET = 64;      // of 8-bit weights
constexpr int64_t WORTH_A_THREAD = 1 << 14;  // numbers to quantise
constexpr float SMALLEST = 1e-30f;           // a group of less counts as zeros: 127 / largest must stay finite

typedef uint16_t Half;  // the bits of a 16-bit float

// A layer's numbers, as quantisation.py hands them over: once, for a call with few numbers is cheaper than one with many.
struct Weights {
    const uint8_t* data;   // [tiles, groups, ...] as above
    const void* scales;    // [tiles, groups, 16]: float with 8 bits, Half with 4
    const void* minima;    // likewise; null with 8 bits
    const float* bias;     // [outputs], or null
    int64_t size, outputs;
};

// --- a tile's 16 outputs, as 16 numbers of 32 bits or as 64 bytes, four to an output ---------------------------------

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define VECTORS

constexpr int ROWS = 8;  // of x at a time: their sums and totals are half of the 32 registers

typedef __m512i Whole;
typedef __m512 Floats;

inline Whole same(int32_t x) { return _mm512_set1_epi32(x); }
inline Floats same(float x) { return _mm512_set1_ps(x); }
inline Floats floats(Whole x) { return _mm512_cvtepi32_ps(x); }
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats add(Floats sum, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, sum); }
inline Floats numbers(const float* p) { return _mm512_loadu_ps(p); }
inline Floats numbers(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void put(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Whole bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }

inline Whole nibbles(const uint8_t* p) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), nibble = _mm256_set1_epi8(15);
    const __m256i low = _mm256_and_si256(both, nibble), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// sums += w[output][0..3] . x[0..3], which one instruction does.
inline void add_products(Whole& sums, Whole w, int32_t x) { sums = _mm512_dpbusd_epi32(sums, w, same(x)); }
inline void add_small_products(Whole& sums, Whole w, int32_t x) { add_products(sums, w, x); }
inline Whole sum_of_small(Whole sums) { return sums; }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define VECTORS

constexpr int ROWS = 4;  // their sums are half of the 16 registers

struct Whole {
    __m256i half[2];
};
struct Floats {
    __m256 half[2];
};

inline __m256i load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256 eight_halves(const Half* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline Whole same(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Floats same(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats floats(const Whole& x) { return {_mm256_cvtepi32_ps(x.half[0]), _mm256_cvtepi32_ps(x.half[1])}; }
inline Floats times(const Floats& a, const Floats& b) {
    return {_mm256_mul_ps(a.half[0], b.half[0]), _mm256_mul_ps(a.half[1], b.half[1])};
}
inline Floats add(const Floats& sum, const Floats& a, const Floats& b) {
    return {_mm256_fmadd_ps(a.half[0], b.half[0], sum.half[0]), _mm256_fmadd_ps(a.half[1], b.half[1], sum.half[1])};
}
inline Floats numbers(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Floats numbers(const Half* p) { return {eight_halves(p), eight_halves(p + 8)}; }
inline void put(float* p, const Floats& x) {
    _mm256_storeu_ps(p, x.half[0]);
    _mm256_storeu_ps(p + 8, x.half[1]);
}
inline Whole bytes(const uint8_t* p) { return {load(p), load(p + 32)}; }

inline Whole nibbles(const uint8_t* p) {
    const __m256i both = load(p), nibble = _mm256_set1_epi8(15);
    return {_mm256_and_si256(both, nibble), _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble)};
}

// Add here and now. The compiler would put the additions of a whole group off to its end, which takes more registers than
// there are.
inline void settle(__m256i& sums) { asm("" : "+x"(sums)); }

// sums += w[output][0..3] . x[0..3]
inline void add_products(Whole& sums, const Whole& w, int32_t x) {
    const __m256i four = _mm256_set1_epi32(x);
    for (int h = 0; h < 2; ++h) {
#ifdef __AVXVNNI__
        sums.half[h] = _mm256_dpbusd_avx_epi32(sums.half[h], w.half[h], four);
#else
        const __m256i pairs = _mm256_maddubs_epi16(w.half[h], four);
        sums.half[h] = _mm256_add_epi32(sums.half[h], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
        settle(sums.half[h]);
    }
}

// The same for 4 bits: in pairs of 16 bits, which a group never fills, and which are added up in the end.
inline void add_small_products(Whole& sums, const Whole& w, int32_t x) {
    const __m256i four = _mm256_set1_epi32(x);
    for (int h = 0; h < 2; ++h) {
        sums.half[h] = _mm256_add_epi16(sums.half[h], _mm256_maddubs_epi16(w.half[h], four));
        settle(sums.half[h]);
    }
}
inline Whole sum_of_small(const Whole& sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(sums.half[0], ones), _mm256_madd_epi16(sums.half[1], ones)};
}

#else

constexpr int ROWS = 4;

#endif

inline int32_t four_of(const int8_t* x) {
    int32_t bits;
    std::memcpy(&bits, x, 4);
    return bits;
}

// --- activations -----------------------------------------------------------------------------------------------------

// x as whole numbers of -127 to 127, x = scale * value, ROWS of them side by side as the kernels want them.
struct Activations {
    int64_t groups;
    std::vector<int8_t> values;    // [T / ROWS, groups, 8 steps, ROWS, 4 columns]
    std::vector<float> scales;     // [T / ROWS, groups, ROWS]
    std::vector<int32_t> offsets;  // likewise: what the offset of the 8-bit weights adds to the products, negative
    std::vector<float> sums;       // likewise: of x itself, for the minima of the 4-bit weights

    // Where the numbers of one group of the rows from `row` on begin; rows are taken ROWS at a time.
    int64_t at(int64_t row, int64_t group) const { return (row / ROWS * groups + group) * ROWS; }
};

// The group's largest absolute value. Bits of positive floats are in the order of the floats, and NaN is the largest:
// compared as whole numbers they can be compared eight at a time, and no NaN gets lost.
inline float largest_of(const float* x) {
    int32_t largest = 0;
    for (int i = 0; i < GROUP; ++i) {
        int32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        largest = std::max(largest, bits & 0x7fffffff);
    }
    float value;
    std::memcpy(&value, &largest, sizeof value);
    return value;
}

void quantise_row(const float* x, int64_t size, int64_t row, Activations& a) {
    static const float nothing[GROUP] = {};
    for (int64_t g = 0; g < a.groups; ++g) {
        float last[GROUP] = {};
        const float* group = x + g * GROUP;
        if ((g + 1) * GROUP > size) {
            std::copy(group, x + size, last);
            group = last;
        }
        const float largest = largest_of(group), inverse = largest > SMALLEST ? 127 / largest : 0;
        if (!(largest < INFINITY)) group = nothing;  // NaN isn't a whole number; 0 times this scale is NaN again
        int8_t values[GROUP];
        int32_t sum = 0;
        for (int i = 0; i < GROUP; ++i) {
            const auto value = static_cast<int32_t>(std::nearbyint(group[i] * inverse));
            sum += value;
            values[i] = static_cast<int8_t>(value);
        }
        const int64_t place = a.at(row, g) + row % ROWS;
        a.scales[place] = largest / 127;
        a.offsets[place] = -OFFSET * sum;
        a.sums[place] = largest / 127 * sum;
        int8_t* first = &a.values[a.at(row, g) * GROUP + row % ROWS * 4];
        for (int k = 0; k < STEPS; ++k) std::memcpy(first + k * ROWS * 4, values + k * 4, 4);
    }
}

void quantise(const float* x, int64_t stride, int64_t T, int64_t size, Activations& a, int threads) {
    a.groups = (size + GROUP - 1) / GROUP;
    const int64_t numbers = (T + ROWS - 1) / ROWS * ROWS * a.groups;
    a.values.resize(numbers * GROUP);
    a.scales.resize(numbers);
    a.offsets.resize(numbers);
    a.sums.resize(numbers);
#pragma omp parallel for num_threads(threads) if (T * size >= WORTH_A_THREAD)
    for (int64_t t = 0; t < T; ++t) quantise_row(x + t * stride, size, t, a);
}

// --- products --------------------------------------------------------------------------------------------------------

#ifdef VECTORS

// One tile for R rows, 8 bits. The loops over steps and rows are unrolled, so that all places are known beforehand.
// Meanwhile the cache fetches what lies `ahead` bytes further on: the next tile, when the last rows have their turn.
template <int R>
inline void tile_int8(const Activations& a, int64_t row, const uint8_t* weights, const float* scales, int64_t ahead,
                      float* out) {
    Floats total[R];
    for (int r = 0; r < R; ++r) total[r] = same(0.0f);
    for (int64_t g = 0; g < a.groups; ++g) {
        const int64_t at = a.at(row, g);
        const uint8_t* w = weights + g * GROUP * TILE;
        const int8_t* x = &a.values[at * GROUP];
        Whole sums[R];
        for (int r = 0; r < R; ++r) sums[r] = same(a.offsets[at + r]);
#pragma GCC unroll 8
        for (int k = 0; k < STEPS; ++k) {
            const Whole step = bytes(w + k * 64);
            __builtin_prefetch(w + ahead + k * 64);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) add_products(sums[r], step, four_of(x + (k * ROWS + r) * 4));
        }
        const Floats scale = numbers(scales + g * TILE);
        for (int r = 0; r < R; ++r)
            total[r] = add(total[r], floats(sums[r]), times(scale, same(a.scales[at + r])));
    }
    for (int r = 0; r < R; ++r) put(out + r * TILE, total[r]);
}

// One tile for R rows, 4 bits with a minimum: scale * (q . x) + minimum * (1 . x).
template <int R>
inline void tile_int4(const Activations& a, int64_t row, const uint8_t* weights, const Half* scales, const Half* minima,
                      int64_t ahead, float* out) {
    Floats total[R];
    for (int r = 0; r < R; ++r) total[r] = same(0.0f);
    for (int64_t g = 0; g < a.groups; ++g) {
        const int64_t at = a.at(row, g);
        const uint8_t* w = weights + g * GROUP * TILE / 2;
        const int8_t* x = &a.values[at * GROUP];
        Whole sums[R];
        for (int r = 0; r < R; ++r) sums[r] = same(0);
#pragma GCC unroll 8
        for (int k = 0; k < STEPS; ++k) {
            const Whole step = nibbles(w + k * 32);
            if (k % 2 == 0) __builtin_prefetch(w + ahead + k * 32);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) add_small_products(sums[r], step, four_of(x + (k * ROWS + r) * 4));
        }
        const Floats scale = numbers(scales + g * TILE), minimum = numbers(minima + g * TILE);
        for (int r = 0; r < R; ++r) {
            total[r] = add(total[r], floats(sum_of_small(sums[r])), times(scale, same(a.scales[at + r])));
            total[r] = add(total[r], minimum, same(a.sums[at + r]));
        }
    }
    for (int r = 0; r < R; ++r) put(out + r * TILE, total[r]);
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
void tile_int8(const Activations& a, int64_t row, const uint8_t* weights, const float* scales, int64_t, float* out) {
    for (int r = 0; r < R; ++r)
        for (int o = 0; o < TILE; ++o) {
            float total = 0;
            for (int64_t g = 0; g < a.groups; ++g) {
                const int64_t at = a.at(row, g);
                int32_t sum = a.offsets[at + r];
                for (int i = 0; i < GROUP; ++i)
                    sum += a.values[at * GROUP + (i / 4 * ROWS + r) * 4 + i % 4] *
                           weights[g * GROUP * TILE + i / 4 * 64 + o * 4 + i % 4];
                total = std::fma(static_cast<float>(sum), scales[g * TILE + o] * a.scales[at + r], total);
            }
            out[r * TILE + o] = total;
        }
}

template <int R>
void tile_int4(const Activations& a, int64_t row, const uint8_t* weights, const Half* scales, const Half* minima, int64_t,
               float* out) {
    for (int r = 0; r < R; ++r)
        for (int o = 0; o < TILE; ++o) {
            float total = 0;
            for (int64_t g = 0; g < a.groups; ++g) {
                const int64_t at = a.at(row, g);
                int32_t sum = 0;
                for (int i = 0; i < GROUP; ++i) {
                    const uint8_t both = weights[g * GROUP * TILE / 2 + i / 4 * 32 + o % 8 * 4 + i % 4];
                    sum += a.values[at * GROUP + (i / 4 * ROWS + r) * 4 + i % 4] * (o < 8 ? both & 15 : both >> 4);
                }
                total = std::fma(static_cast<float>(sum), number(scales[g * TILE + o]) * a.scales[at + r], total);
                total = std::fma(number(minima[g * TILE + o]), a.sums[at + r], total);
            }
            out[r * TILE + o] = total;
        }
}

#endif

template <typename Scale, int R>
void rows_of_tile(const Activations& a, int64_t row, const uint8_t* weights, const Scale* scales, const Scale* minima,
                  const float* bias, int64_t ahead, float* out, int64_t outputs, int64_t first) {
    alignas(64) float result[R * TILE];
    if constexpr (sizeof(Scale) == sizeof(Half))
        tile_int4<R>(a, row, weights, scales, minima, ahead, result);
    else
        tile_int8<R>(a, row, weights, scales, ahead, result);
    const int64_t count = std::min<int64_t>(TILE, outputs - first);
    for (int r = 0; r < R; ++r) {
        if (bias)
            for (int64_t o = 0; o < count; ++o) result[r * TILE + o] += bias[first + o];
        std::memcpy(out + (row + r) * outputs + first, result + r * TILE, count * sizeof(float));
    }
}

// For 1 to ROWS rows.
template <typename Scale, int... R>
constexpr auto multipliers(std::integer_sequence<int, R...>) {
    return std::array{rows_of_tile<Scale, R + 1>...};
}

template <typename Scale>
void product(const Weights& weights, const float* x, int64_t stride, float* out, int64_t T, int threads) {
    thread_local Activations a;  // its memory is used again by the next call
    quantise(x, stride, T, weights.size, a, threads);
    const Activations& shared = a;
    const auto *scales = static_cast<const Scale*>(weights.scales), *minima = static_cast<const Scale*>(weights.minima);
    const int64_t outputs = weights.outputs, tiles = (outputs + TILE - 1) / TILE, blocks = (T + ROW_BLOCK - 1) / ROW_BLOCK;
    const int64_t bytes = shared.groups * GROUP * TILE / (minima ? 2 : 1), numbers = shared.groups * TILE;
#pragma omp parallel num_threads(threads)
    for (int64_t block = 0; block < blocks; ++block)
#pragma omp for schedule(static) nowait
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const uint8_t* w = weights.data + tile * bytes;
            const Scale *s = scales + tile * numbers, *m = minima ? minima + tile * numbers : nullptr;
            const int64_t end = std::min(T, (block + 1) * ROW_BLOCK);
            for (int64_t row = block * ROW_BLOCK; row < end; row += ROWS) {
                constexpr auto multiply_rows = multipliers<Scale>(std::make_integer_sequence<int, ROWS>());
                const auto multiply = multiply_rows[std::min<int64_t>(ROWS, end - row) - 1];
                multiply(shared, row, w, s, m, weights.bias, row + ROWS >= end ? bytes : 0, out, outputs, tile * TILE);
            }
        }
}

}  // namespace

extern "C" {

// out[t][j] = x[t] . weight[j] + bias[j]; x [T, size] with `stride` between rows, out [T, outputs].
void quantised_linear(const Weights* weights, const float* x, int64_t stride, float* out, int64_t T, int threads) {
    if (weights->minima)
        product<Half>(*weights, x, stride, out, T, threads);
    else
        product<float>(*weights, x, stride, out, T, threads);
}

}  // extern "C"
