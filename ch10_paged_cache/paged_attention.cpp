// Attention over a cache in blocks, read where it lies: no copy of a sequence's context is ever made.
//
// A task is a few new tokens of one sequence with one or all of its KV heads; tasks are spread over the threads. A task
// goes through the keys in tiles and keeps, for each query, the largest score so far, the sum of the exponentials and
// the weighted values, all of them corrected when a larger score comes: online softmax (arXiv:1805.02867), as in
// FlashAttention (arXiv:2205.14135), algorithm 1. paged_attention.py has the same in plain torch.
//
// Decoding waits for memory, and memory is fast only where it is read in order: a task with all heads reads whole
// blocks, where one head's part of each, with gaps between, comes at less than half of that speed.
//
//     keys, values   [N, KV, block_size, D]    float, or int8 with a scale for each row
//     tables         [S, M]                    blocks of each sequence
//     query_starts   [S + 1]                   sequence s has the packed rows [query_starts[s], query_starts[s + 1])
//     context_lens   [S]                       tokens of it that are stored, these new ones included

#include <cmath>
#include <cstdint>
#include <vector>

#include "../shared/vector_math.h"

namespace {

constexpr int KEYS = 32;    // in a tile: with the values and the transposed keys, D = 64 takes half of a small L1 cache
constexpr int QUERIES = 8;  // new tokens in a task
constexpr int FEW = 6;      // rows up to which transposing the keys costs more than it saves
constexpr int ENOUGH = 4;   // sequences a thread from which on one that decodes isn't divided
constexpr int64_t WORTH_A_THREAD = 1 << 18;  // multiplications

struct Shape {
    int64_t H, KV, block_size, M;
};

// One KV head of one sequence: where each of its tokens' keys or values begin.
template <typename T, int D>
struct Rows {
    const T* cache;
    const float* scales;
    const int32_t* table;
    Shape shape;
    int64_t head;  // where they begin; `of` gives those of a later one

    Rows of(int64_t later) const { return {cache, scales, table, shape, head + later}; }

    // Row of token `j`; `buffer` [D] is used if the numbers have to be made first.
    const float* get(int64_t j, float* buffer) const {
        const int64_t row = (table[j / shape.block_size] * shape.KV + head) * shape.block_size + j % shape.block_size;
        if constexpr (sizeof(T) == sizeof(float)) {
            return cache + row * D;
        } else {
            const float scale = scales[row];
            for (int d = 0; d < D; ++d) buffer[d] = cache[row * D + d] * scale;
            return buffer;
        }
    }
};

// scores[r][j] = q[r] . key[j], for few rows: a dot product for each pair.
template <int D>
void score_few(const float* q, int rows, const float* const* key, int count, float* scores) {
    for (int j = 0; j < count; ++j)
        for (int r = 0; r < rows; ++r) {
            Vector s0 = {}, s1 = {};
            for (int d = 0; d < D; d += 16) {
                s0 += load(q + r * D + d) * load(key[j] + d);
                if (d + 8 < D) s1 += load(q + r * D + d + 8) * load(key[j] + d + 8);
            }
            scores[r * KEYS + j] = sum(s0 + s1);
        }
}

// The same for many rows: with the keys transposed, all sums of a tile are made side by side.
template <int D>
void score_many(const float* q, int rows, const float* const* key, int count, float* scores) {
    alignas(32) float transposed[D][KEYS];
    for (int j = 0; j < KEYS; ++j)
        for (int d = 0; d < D; ++d) transposed[d][j] = j < count ? key[j][d] : 0;
    int r = 0;
    for (; r + 2 <= rows; r += 2) {
        Vector a[KEYS / 8] = {}, b[KEYS / 8] = {};
        for (int d = 0; d < D; ++d)
            for (int v = 0; v < KEYS / 8; ++v) {
                const Vector k = load(&transposed[d][8 * v]);
                a[v] += q[r * D + d] * k;
                b[v] += q[(r + 1) * D + d] * k;
            }
        for (int v = 0; v < KEYS / 8; ++v) save(scores + r * KEYS + 8 * v, a[v]), save(scores + (r + 1) * KEYS + 8 * v, b[v]);
    }
    for (; r < rows; ++r) {
        Vector a[KEYS / 8] = {};
        for (int d = 0; d < D; ++d)
            for (int v = 0; v < KEYS / 8; ++v) a[v] += q[r * D + d] * load(&transposed[d][8 * v]);
        for (int v = 0; v < KEYS / 8; ++v) save(scores + r * KEYS + 8 * v, a[v]);
    }
}

// Some queries with the query heads of one KV head, and how far they have come: row r is query r / G, head r % G.
struct Progress {
    int rows, count;  // count: of queries
    float *q, *sums;  // [rows, D]
    float *largest, *total;  // [rows]
};

// Go on over the tile from key `start` on. scores: space for [rows, KEYS].
template <typename T, int D>
void attend_tile(const Progress& p, const Rows<T, D>& keys, const Rows<T, D>& values, int64_t start, int64_t context,
                 float* scores) {
    const int G = p.rows / p.count, tile = std::min<int64_t>(KEYS, context - start);
    alignas(32) float key_space[KEYS][D], value_space[KEYS][D];
    const float *key[KEYS], *value[KEYS];
    for (int j = 0; j < tile; ++j) {
        key[j] = keys.get(start + j, key_space[j]);
        value[j] = values.get(start + j, value_space[j]);
    }
    p.rows <= FEW ? score_few<D>(p.q, p.rows, key, tile, scores) : score_many<D>(p.q, p.rows, key, tile, scores);
    for (int r = 0; r < p.rows; ++r) {
        // The last query sees the whole context, each earlier one a token less.
        const int seen = std::min<int64_t>(tile, context - start - (p.count - 1 - r / G));
        if (seen <= 0) continue;
        float* s = scores + r * KEYS;
        float highest = p.largest[r];
        for (int j = 0; j < seen; ++j) highest = s[j] > highest ? s[j] : highest;
        for (int j = seen; j < KEYS; ++j) s[j] = -INFINITY;
        float sum_of_tile = 0;
#pragma omp simd reduction(+ : sum_of_tile)
        for (int j = 0; j < KEYS; ++j) {
            s[j] = s[j] == -INFINITY ? 0 : exponential(s[j] - highest);
            sum_of_tile += s[j];
        }
        const float shrink = p.largest[r] == -INFINITY ? 0 : exponential(p.largest[r] - highest);
        p.total[r] = p.total[r] * shrink + sum_of_tile;
        p.largest[r] = highest;
        Vector o[D / 8];
        for (int v = 0; v < D / 8; ++v) o[v] = load(p.sums + r * D + 8 * v) * shrink;
        for (int j = 0; j < seen; ++j)
            for (int v = 0; v < D / 8; ++v) o[v] += s[j] * load(value[j] + 8 * v);
        for (int v = 0; v < D / 8; ++v) save(p.sums + r * D + 8 * v, o[v]);
    }
}

// `count` queries of a sequence, with `heads` KV heads from that of `keys` on. q and out point to the first query.
template <typename T, int D>
void attend(const float* q, int64_t q_stride, Rows<T, D> keys, Rows<T, D> values, int heads, float* out, int64_t context,
            int count) {
    const Shape shape = keys.shape;
    const int G = shape.H / shape.KV, rows = count * G, all = heads * rows;
    std::vector<float> space(all * (2 * D + 2) + rows * KEYS);
    float *mine = space.data(), *sums = mine + all * D, *largest = sums + all * D, *total = largest + all;
    float* scores = total + all;
    const float scale = 1 / std::sqrt(static_cast<float>(D));
    for (int r = 0; r < all; ++r) {
        const float* from = q + r % rows / G * q_stride + ((keys.head + r / rows) * G + r % G) * D;
        for (int d = 0; d < D; ++d) mine[r * D + d] = from[d] * scale;
        largest[r] = -INFINITY;
    }
    for (int64_t start = 0; start < context; start += KEYS)
        for (int h = 0; h < heads; ++h) {
            const int r = h * rows;
            const Progress progress{rows, count, mine + r * D, sums + r * D, largest + r, total + r};
            attend_tile<T, D>(progress, keys.of(h), values.of(h), start, context, scores);
        }
    for (int r = 0; r < all; ++r) {
        float* to = out + (r % rows / G * shape.H + (keys.head + r / rows) * G + r % G) * D;
        for (int d = 0; d < D; ++d) to[d] = sums[r * D + d] / total[r];
    }
}

struct Task {
    int32_t sequence, head, heads, first, count;
};

template <typename T, int D>
void attend_all(const float* q, int64_t q_stride, const T* keys, const T* values, const float* key_scales,
                const float* value_scales, const int32_t* tables, const int32_t* query_starts,
                const int32_t* context_lens, float* out, int64_t S, Shape shape, int threads) {
    std::vector<Task> tasks;
    int64_t work = 0;
    for (int32_t s = 0; s < S; ++s) {
        const int32_t count = query_starts[s + 1] - query_starts[s];
        work += static_cast<int64_t>(count) * context_lens[s] * shape.H * D;
        const int32_t heads = count == 1 && S >= ENOUGH * threads ? shape.KV : 1;
        for (int32_t first = 0; first < count; first += QUERIES)
            for (int32_t head = 0; head < shape.KV; head += heads)
                tasks.push_back({s, head, heads, first, std::min(QUERIES, count - first)});
    }
    const int64_t count = tasks.size();
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (work >= WORTH_A_THREAD)
    for (int64_t i = 0; i < count; ++i) {
        const Task task = tasks[count - 1 - i];  // of a prompt the last, which see most, first
        const int64_t row = query_starts[task.sequence] + task.first;
        const int32_t* table = tables + task.sequence * shape.M;
        const int64_t after = query_starts[task.sequence + 1] - row - task.count;
        const Rows<T, D> k{keys, key_scales, table, shape, task.head}, v{values, value_scales, table, shape, task.head};
        attend<T, D>(q + row * q_stride, q_stride, k, v, task.heads, out + row * shape.H * D, context_lens[task.sequence] - after,
                     task.count);
    }
}

template <typename T>
int attend_any(int64_t D, const float* q, int64_t q_stride, const T* keys, const T* values, const float* key_scales,
               const float* value_scales, const int32_t* tables, const int32_t* query_starts,
               const int32_t* context_lens, float* out, int64_t S, Shape shape, int threads) {
    switch (D) {
#define CASE(N)                                                                                                       \
    case N:                                                                                                           \
        attend_all<T, N>(q, q_stride, keys, values, key_scales, value_scales, tables, query_starts, context_lens, out, \
                         S, shape, threads);                                                                          \
        return 1
        CASE(8);
        CASE(16);
        CASE(32);
        CASE(64);
        CASE(80);
        CASE(96);
        CASE(128);
        CASE(256);
#undef CASE
    }
    return 0;
}

}  // namespace

extern "C" {

// Put row t of k and v, [T, KV, D] with `stride` between tokens, into place slots[t] = block * block_size + offset.
void store(const float* k, const float* v, int64_t stride, const int64_t* slots, float* keys, float* values, int64_t T,
           int64_t KV, int64_t block_size, int64_t D) {
    for (int64_t t = 0; t < T; ++t)
        for (int64_t head = 0; head < KV; ++head) {
            const int64_t row = (slots[t] / block_size * KV + head) * block_size + slots[t] % block_size;
            std::memcpy(keys + row * D, k + t * stride + head * D, D * sizeof(float));
            std::memcpy(values + row * D, v + t * stride + head * D, D * sizeof(float));
        }
}

// The same into int8: each row's largest absolute value becomes 127, and its scale tells what 1 stands for.
void store_int8(const float* k, const float* v, int64_t stride, const int64_t* slots, int8_t* keys, int8_t* values,
                float* key_scales, float* value_scales, int64_t T, int64_t KV, int64_t block_size, int64_t D) {
    for (int64_t t = 0; t < T; ++t)
        for (int64_t head = 0; head < KV; ++head) {
            const int64_t row = (slots[t] / block_size * KV + head) * block_size + slots[t] % block_size;
            for (int which = 0; which < 2; ++which) {
                const float* x = (which ? v : k) + t * stride + head * D;
                float largest = 0;
                for (int64_t d = 0; d < D; ++d) largest = std::max(largest, std::fabs(x[d]));
                const float scale = largest / 127, inverse = largest > 0 ? 127 / largest : 0;
                int8_t* target = (which ? values : keys) + row * D;
                for (int64_t d = 0; d < D; ++d) target[d] = static_cast<int8_t>(std::nearbyint(x[d] * inverse));
                (which ? value_scales : key_scales)[row] = scale;
            }
        }
}

// out [T, H, D] for q [T, H, D] with `q_stride` between tokens. Returns 0, and does nothing, for a D it isn't built for.
int attention(const float* q, int64_t q_stride, const float* keys, const float* values, const int32_t* tables, int64_t M,
              const int32_t* query_starts, const int32_t* context_lens, float* out, int64_t S, int64_t H, int64_t KV,
              int64_t block_size, int64_t D, int threads) {
    return attend_any<float>(D, q, q_stride, keys, values, nullptr, nullptr, tables, query_starts, context_lens, out, S,
                             {H, KV, block_size, M}, threads);
}

int attention_int8(const float* q, int64_t q_stride, const int8_t* keys, const int8_t* values, const float* key_scales,
                   const float* value_scales, const int32_t* tables, int64_t M, const int32_t* query_starts,
                   const int32_t* context_lens, float* out, int64_t S, int64_t H, int64_t KV, int64_t block_size,
                   int64_t D, int threads) {
    return attend_any<int8_t>(D, q, q_stride, keys, values, key_scales, value_scales, tables, query_starts,
                              context_lens, out, S, {H, KV, block_size, M}, threads);
}

}  // extern "C"
