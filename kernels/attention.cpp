// Paged attention on a host: queries of a row over its keys and values, read where they lie.
//
// Softmax is kept up to date tile by tile (Milakov and Gimelshein 2018; Dao et al. 2022). A query
// meets its keys in one order, in tiles that begin at fixed positions, whoever else is there: its
// result depends neither on neighbours, nor on how a prompt was cut, nor on threads. `reference.py`
// says what is right; widths are multiples of 8.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "pool.h"

namespace {

constexpr int64_t TILE = 16;  // keys

// The sums of four lanes, each in the same fixed order.
inline void sums(const Lane* four, float* out) {
    const Whole even = {0, 2, 8, 10, 4, 6, 12, 14}, odd = {1, 3, 9, 11, 5, 7, 13, 15};
    const auto pairs = [&](Lane one, Lane two) {
        return __builtin_shuffle(one, two, even) + __builtin_shuffle(one, two, odd);
    };
    const Lane all = pairs(pairs(four[0], four[1]), pairs(four[2], four[3]));
    for (int i = 0; i < 4; ++i) out[i] = all[i] + all[i + 4];
}

struct Layer {
    const float* query;   // [tokens, heads, width], a token `stride` numbers after the one before
    const float* keys;    // [pages, size, key heads, width]
    const float* values;  // [pages, size, key heads, value width]
    const float* sinks;   // [heads], or null
    float* out;           // [tokens, heads, value width]
    int64_t heads, key_heads, width, value_width, size, stride;
    int64_t window;  // 0: none
    float scaling;
    float softcap;  // 0: none
};

// Scores of Q queries with four keys.
template <int Q>
inline void score(const float* query, const float* const* keys, int64_t width, float* scores) {
    Lane products[Q][4] = {};
    for (int64_t d = 0; d < width; d += LANE)
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            const Lane key = load(keys[k] + d);
#pragma GCC unroll 4
            for (int q = 0; q < Q; ++q) products[q][k] += load(query + q * width + d) * key;
        }
    for (int q = 0; q < Q; ++q) sums(products[q], scores + q * TILE);
}

// Adds a tile's weighted values to Q results, L lanes at a time.
template <int Q, int L>
inline void gather(const float* weights, const float* const* values, int64_t count, int64_t width,
                   int64_t d, float* results) {
    Lane own[Q][L];
    for (int q = 0; q < Q; ++q)
        for (int l = 0; l < L; ++l) own[q][l] = load(results + q * width + d + l * LANE);
    for (int64_t k = 0; k < count; ++k)
#pragma GCC unroll 4
        for (int l = 0; l < L; ++l) {
            const Lane value = load(values[k] + d + l * LANE);
#pragma GCC unroll 4
            for (int q = 0; q < Q; ++q) own[q][l] += weights[q * TILE + k] * value;
        }
    for (int q = 0; q < Q; ++q)
        for (int l = 0; l < L; ++l) store(results + q * width + d + l * LANE, own[q][l]);
}

// Some queries of a row that share a key head, on their way through the row's keys.
class Walk {
  public:
    Walk(const Layer& layer, int64_t token, int64_t count, int64_t position, int64_t head)
        : of(layer), token(token), position(position), head(head),
          group(layer.heads / layer.key_heads), queries(count * group),
          room(queries * (of.width + of.value_width + TILE + 2)) {
        query = room.data();
        results = query + queries * of.width;
        scores = results + queries * of.value_width;
        most = scores + queries * TILE;
        total = most + queries;
        for (int64_t q = 0; q < queries; ++q) {
            const float* from = of.query + (token + q / group) * of.stride +
                                (head * group + q % group) * of.width;
            std::memcpy(query + q * of.width, from, of.width * sizeof(float));
            most[q] = of.sinks ? of.sinks[head * group + q % group] : NOTHING;
            total[q] = of.sinks ? 1.0f : 0.0f;
        }
    }

    void run(const int32_t* table) {
        const int64_t end = position + queries / group;
        const int64_t begin = of.window ? std::max<int64_t>(position + 1 - of.window, 0) : 0;
        for (int64_t first = begin / TILE * TILE; first < end; first += TILE)
            tile(table, first, std::min(first + TILE, end) - first);
        for (int64_t q = 0; q < queries; ++q) {
            float* out = of.out + place(q) * of.value_width;
            const float whole = 1.0f / total[q];
            for (int64_t d = 0; d < of.value_width; d += LANE)
                store(out + d, load(results + q * of.value_width + d) * whole);
        }
    }

  private:
    // Of a query, by query of the row and then by head of the group, in [tokens, heads].
    int64_t place(int64_t q) const {
        return (token + q / group) * of.heads + head * group + q % group;
    }

    void tile(const int32_t* table, int64_t first, int64_t count) {
        const float *keys[TILE], *values[TILE];
        for (int64_t k = 0; k < TILE; ++k) {
            const int64_t at = first + std::min(k, count - 1);  // what is beyond weighs nothing
            const int64_t slot = table[at / of.size] * of.size + at % of.size;
            keys[k] = of.keys + (slot * of.key_heads + head) * of.width;
            values[k] = of.values + (slot * of.key_heads + head) * of.value_width;
        }
        int64_t q = 0;
        for (; q + 3 <= queries; q += 3) several<3>(q, keys, values, first, count);
        for (; q < queries; ++q) several<1>(q, keys, values, first, count);
    }

    template <int Q>
    void several(int64_t q, const float* const* keys, const float* const* values, int64_t first,
                 int64_t count) {
        for (int64_t k = 0; k < count; k += 4)
            score<Q>(query + q * of.width, keys + k, of.width, scores + q * TILE + k);
        for (int i = 0; i < Q; ++i) weigh(q + i, first, count);
        const float* weights = scores + q * TILE;
        float* own = results + q * of.value_width;
        int64_t d = 0;
        for (; d + 2 * LANE <= of.value_width; d += 2 * LANE)
            gather<Q, 2>(weights, values, count, of.value_width, d, own);
        for (; d < of.value_width; d += LANE)
            gather<Q, 1>(weights, values, count, of.value_width, d, own);
    }

    // Makes a query's scores weights, and what it had so far comparable.
    void weigh(int64_t q, int64_t first, int64_t count) {
        const int32_t at = position + q / group - first;
        const int32_t end = std::min<int32_t>(count, at + 1);
        const int32_t begin = of.window ? at + 1 - static_cast<int32_t>(of.window) : 0;
        float* own = scores + q * TILE;
        if (of.softcap != 0.0f)
            for (int64_t k = 0; k < TILE; ++k)
                own[k] = std::tanh(own[k] * of.scaling / of.softcap) * of.softcap / of.scaling;
        Lane score[2];
        for (int i = 0; i < 2; ++i) {
            const Whole key = Whole{0, 1, 2, 3, 4, 5, 6, 7} + i * static_cast<int32_t>(LANE);
            const Whole seen = (key >= begin) & (key < end);
            score[i] = seen ? load(own + i * LANE) * of.scaling : Lane{} + NOTHING;
        }
        const float highest = std::max(most[q], largest(score[0] > score[1] ? score[0] : score[1]));
        const float less = highest == NOTHING ? 0.0f : std::exp(most[q] - highest);
        const Lane from = Lane{} + (highest == NOTHING ? 0.0f : highest);
        const Lane weight[2] = {exponential(score[0] - from), exponential(score[1] - from)};
        for (int i = 0; i < 2; ++i) store(own + i * LANE, weight[i]);
        total[q] = total[q] * less + sum(weight[0] + weight[1]);
        if (less == 1.0f) return;
        most[q] = highest;
        float* result = results + q * of.value_width;
        for (int64_t d = 0; d < of.value_width; d += LANE)
            store(result + d, load(result + d) * less);
    }

    const Layer& of;
    const int64_t token, position, head, group, queries;
    std::vector<float> room;
    float *query, *results, *scores, *most, *total;
};

}  // namespace

// Numbers of tokens [tokens, heads * width], `stride` apart, to their slots in pages; a slot below
// 0 is nowhere.
extern "C" void carpool_put(float* pages, const float* tokens, const int64_t* slots, int64_t count,
                            int64_t numbers, int64_t stride) {
    for (int64_t token = 0; token < count; ++token)
        if (slots[token] >= 0)
            std::memcpy(pages + slots[token] * numbers, tokens + token * stride,
                        numbers * sizeof(float));
}

// spans [rows, 3]: first packed token, queries, keys; blocks [blocks, 2]: a row, and the first of
// its queries that are taken together, at most `most`; table [rows, width] of page numbers.
extern "C" void carpool_attend(const Layer* layer, const int32_t* spans, const int32_t* blocks,
                               const int32_t* table, int64_t count, int64_t width, int64_t most,
                               int threads) {
    const int64_t units = count * layer->key_heads;
    carpool::pool().run(units, threads, [&](int64_t unit) {
        const int32_t* block = blocks + unit / layer->key_heads * 2;
        const int32_t* span = spans + block[0] * 3;
        const int64_t queries = std::min<int64_t>(span[1] - block[1], most);
        const int64_t position = span[2] - span[1] + block[1];
        Walk walk(*layer, span[0] + block[1], queries, position, unit % layer->key_heads);
        walk.run(table + block[0] * width);
    });
}
