// What an encoder's layer does after attention, in one pass: a product, a norm, two products with
// GELU between them, and a norm, each with what came in added.
//
// Many rows go through in blocks, from beginning to end while they are near; few go through product
// by product, so that all threads work on them. A row's result depends on that row alone.

#include <cmath>
#include <vector>

#include "panels.h"

namespace {

constexpr int64_t BLOCK = 48;   // rows: what lies between the products stays in the second cache
constexpr int64_t ALONE = 12;   // rows that are worth a thread's reading all weights

struct Norm {
    const float *weight, *bias;
    float epsilon;
};

struct After {
    Weight out, up, down;
    Norm first, second;
    int64_t heads, width, inner;  // numbers of a row: of attention, of the layer, between
};

// Layer norm (Ba et al. 2016) of rows [rows, width]; `to` may be where they are.
void normed(const Norm& norm, const float* from, float* to, int64_t rows, int64_t width) {
    for (const float* end = from + rows * width; from < end; from += width, to += width) {
        Lane all = {}, squares = {};
        for (int64_t d = 0; d < width; d += LANE) all += load(from + d);
        const float mean = sum(all) / width;
        for (int64_t d = 0; d < width; d += LANE) {
            const Lane off = load(from + d) - mean;
            squares += off * off;
        }
        const float scale = 1.0f / std::sqrt(sum(squares) / width + norm.epsilon);
        for (int64_t d = 0; d < width; d += LANE)
            store(to + d, (load(from + d) - mean) * scale * load(norm.weight + d) + load(norm.bias + d));
    }
}

struct Pass {
    const After& of;
    const float *attended, *input;
    float *middle, *between, *output;

    Product out() const { return {&of.out, 1, attended, input, middle, of.heads}; }
    Product up() const { return {&of.up, 1, middle, nullptr, between, of.width}; }
    Product down() const { return {&of.down, 1, between, middle, output, of.inner}; }

    void run(int64_t rows, int threads) const {
        for (int i = 0; i < 3; ++i) {
            make(i == 0 ? out() : i == 1 ? up() : down(), rows, threads);
            float* at = i == 0 ? middle : output;
            if (i != 1) normed(i == 0 ? of.first : of.second, at, at, rows, of.width);
        }
    }
};

}  // namespace

// attended [rows, heads], input and output [rows, width].
extern "C" void carpool_after_attention(const After* after, const float* attended,
                                        const float* input, float* output, int64_t rows,
                                        int threads) {
    const bool few = threads > 1 && rows < ALONE * threads;
    const int64_t most = few ? 1 : (rows + BLOCK - 1) / BLOCK;
    const int64_t blocks = few ? 1 : std::min((most + threads - 1) / threads * threads, rows);
    const auto pass = [&](int64_t row, int64_t some) {
        static thread_local std::vector<float> room;
        const size_t size = some * (after->width + after->inner);
        if (room.size() < size) room.resize(size);
        return Pass{*after,      attended + row * after->heads,      input + row * after->width,
                    room.data(), room.data() + some * after->width, output + row * after->width};
    };
    if (few) return pass(0, rows).run(rows, threads);
    carpool::pool().run(blocks, threads, [&](int64_t block) {
        const int64_t row = block * rows / blocks, some = (block + 1) * rows / blocks - row;
        pass(row, some).run(some, 1);
    });
}
