// Rows times panels of 16 columns, for the C++ of this room.
//
// After Goto and van de Geijn 2008 and BLIS (Van Zee and van de Geijn 2015): a tile of up to 6 rows
// is summed in registers while the panel stays in the nearest cache. A panel may hold numbers of 16
// bits: they are widened in registers, which is hidden behind the sums and reads half as much memory.
// Every result is a sum over the depth in one order, made by one thread: it depends neither on how
// many rows there are, nor on the other rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "pool.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace {

typedef uint32_t Bits __attribute__((vector_size(32)));

constexpr int64_t COLUMNS = 2 * LANE;  // of a panel
constexpr int64_t PART = 384;          // of the depth, summed by itself: less is rounded away
constexpr int64_t SHARES = 8;          // of a product a thread, so that whoever is late does less
constexpr int64_t HEIGHT = 96;         // rows at a time: they stay near while panels go by
constexpr int ROWS = 6;                // of a tile: 12 sums, 2 weights, 1 input in 16 registers

struct Weights {
    Lane first, second;
};

// How the weights of 16 columns lie at one depth.
struct Single {
    typedef float Number;
    static constexpr int64_t STEP = COLUMNS;
    static Weights read(const Number* at) { return {load(at), load(at + LANE)}; }
};

// bfloat16: a column in the lower 16 bits and the one 8 further in the upper, so that widening
// either takes one instruction.
struct Brain {
    typedef uint32_t Number;
    static constexpr int64_t STEP = LANE;
    static Weights read(const Number* at) {
        const Bits both = load<Bits>(at);
        return {reinterpret_cast<Lane>(both << 16), reinterpret_cast<Lane>(both & 0xffff0000u)};
    }
};

#ifdef __F16C__
// float16. Compilers make slow code of it without the instruction's own name.
struct Half {
    typedef uint16_t Number;
    static constexpr int64_t STEP = COLUMNS;
    static Weights read(const Number* at) { return {widen(at), widen(at + LANE)}; }
    static Lane widen(const Number* at) { return _mm256_cvtph_ps(load<__m128i>(at)); }
};
#endif

#ifdef __AVX512BF16__
// bfloat16 for products of bfloat16: of each of 16 columns two depths side by side.
struct Dots {
    typedef uint32_t Number;
    static constexpr int64_t STEP = COLUMNS;  // of two depths
    static constexpr int ROWS = 12;           // of a tile: 12 sums in 32 registers
};

// Numbers rounded to bfloat16, until the next call of this thread.
inline const uint32_t* narrowed(const float* from, int64_t count) {
    static thread_local std::vector<uint32_t> room;
    if (room.size() < static_cast<size_t>(count / 2 + COLUMNS)) room.resize(count / 2 + COLUMNS);
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const auto both = _mm512_cvtne2ps_pbh(load<__m512>(from + i + 16), load<__m512>(from + i));
        std::memcpy(room.data() + i / 2, &both, sizeof both);
    }
    float left[32] = {};
    std::memcpy(left, from + i, (count - i) * sizeof(float));
    const auto both = _mm512_cvtne2ps_pbh(load<__m512>(left + 16), load<__m512>(left));
    std::memcpy(room.data() + i / 2, &both, (count - i) * sizeof(uint16_t));
    return room.data();
}
#endif

// A layer's weight as it lies, and where its results begin in a row of the output.
struct Weight {
    const void* panels;
    const float* bias;  // [columns up to a multiple of 16], or null
    int64_t columns;
    int64_t format;  // 0 float32, 1 bfloat16, 2 float16, 3 bfloat16 as `Dots` has it
    int64_t gelu;    // not 0: of the results
};

template <class Format>
struct Panel {
    const typename Format::Number* weight;
    const float* bias;  // or null
    int64_t depth;
    int64_t columns;  // fewer than 16 in the last panel of a layer
    int64_t width;    // of a row of the output
    bool gelu;        // of the results
};

// Adds the depths from `first` to `last` to the totals of R rows, which are `stride` apart.
template <int R, class Format>
inline void add(const Panel<Format>& panel, const float* input, int64_t stride, int64_t first,
                int64_t last, Lane (*totals)[2]) {
    Lane sums[R][2] = {};
#pragma GCC unroll 2
    for (int64_t k = first; k < last; ++k) {
        const typename Format::Number* at = panel.weight + k * Format::STEP;
        __builtin_prefetch(at + panel.depth * Format::STEP);  // the next panel, often from memory
        const Weights weights = Format::read(at);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            sums[r][0] += input[r * stride + k] * weights.first;
            sums[r][1] += input[r * stride + k] * weights.second;
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < 2; ++i) totals[r][i] += sums[r][i];
}

// The results of R rows; `more` is added to them, or null.
template <int R, class Format>
inline void finish(const Panel<Format>& panel, Lane (*totals)[2], const float* more,
                   float* output) {
    const int64_t bytes = panel.columns * sizeof(float);
    for (int r = 0; r < R; ++r) {
        if (panel.bias)
            for (int i = 0; i < 2; ++i) totals[r][i] += load(panel.bias + i * LANE);
        if (more) {
            Lane lanes[2] = {};
            std::memcpy(lanes, more + r * panel.width, bytes);
            for (int i = 0; i < 2; ++i) totals[r][i] += lanes[i];
        }
        if (panel.gelu)
            for (int i = 0; i < 2; ++i) totals[r][i] = gelu(totals[r][i]);
        std::memcpy(output + r * panel.width, totals[r], bytes);
    }
}

template <int R, class Format>
inline void tile(const Panel<Format>& panel, const float* input, const float* more, float* output) {
    Lane totals[R][2] = {};
    for (int64_t first = 0; first < panel.depth; first += PART)
        add<R>(panel, input, panel.depth, first, std::min(first + PART, panel.depth), totals);
    finish<R>(panel, totals, more, output);
}

#ifdef __AVX512BF16__
template <int R>
inline void tile(const Panel<Dots>& panel, const uint32_t* input, const float* more,
                 float* output) {
    __m512 sums[R] = {};
    const int64_t pairs = panel.depth / 2;
    for (int64_t k = 0; k < pairs; ++k) {
        const uint32_t* at = panel.weight + k * Dots::STEP;
        __builtin_prefetch(at + pairs * Dots::STEP);
        const auto weights = load<__m512bh>(at);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
            sums[r] = _mm512_dpbf16_ps(
                sums[r], (__m512bh)_mm512_set1_epi32(input[r * pairs + k]), weights);
    }
    Lane totals[R][2];
    std::memcpy(totals, sums, sizeof totals);
    finish<R>(panel, totals, more, output);
}
#endif

template <int R, class Format, class Input>
inline void tile_of(int64_t rows, const Panel<Format>& panel, const Input* input, const float* more,
                    float* output) {
    if (rows == R) return tile<R>(panel, input, more, output);
    if constexpr (R > 1) tile_of<R - 1>(rows, panel, input, more, output);
}

// The columns of one panel, of all rows, of which `step` numbers of a kind are one.
template <int HIGHEST, class Format, class Input>
void multiply(const Weight& weight, int64_t index, const Input* input, int64_t step,
              const float* more, float* output, int64_t rows, int64_t depth, int64_t width) {
    const int64_t column = index * COLUMNS;
    const auto* numbers = static_cast<const typename Format::Number*>(weight.panels);
    const Panel<Format> panel = {numbers + index * step * Format::STEP,
                                 weight.bias ? weight.bias + column : nullptr, depth,
                                 std::min(COLUMNS, weight.columns - column), width, weight.gelu != 0};
    // Tiles of equal height, as a low one takes nearly as long as a full one.
    int64_t row = 0;
    for (int64_t tiles = (rows + HIGHEST - 1) / HIGHEST; tiles > 0; --tiles) {
        const int64_t some = (rows - row + tiles - 1) / tiles;
        const int64_t at = row * width + column;
        tile_of<HIGHEST>(some, panel, input + row * step, more ? more + at : nullptr, output + at);
        row += some;
    }
}

// Rows as the products of all formats take them.
struct Input {
    const float* whole;
    const uint32_t* narrow = nullptr;  // where no weight is of format 3
    int64_t depth;

    Input(bool narrows, const float* rows, int64_t count, int64_t depth)
        : whole(rows), depth(depth) {
#ifdef __AVX512BF16__
        if (narrows) narrow = narrowed(rows, count * depth);
#endif
    }

    void multiply_by(const Weight& weight, int64_t index, const float* more, float* output,
                     int64_t rows, int64_t width) const {
        switch (weight.format) {
#ifdef __AVX512BF16__
            case 3:
                return multiply<Dots::ROWS, Dots>(weight, index, narrow, depth / 2, more, output,
                                                  rows, depth, width);
#endif
#ifdef __F16C__
            case 2:
                return multiply<ROWS, Half>(weight, index, whole, depth, more, output, rows, depth,
                                            width);
#endif
            case 1:
                return multiply<ROWS, Brain>(weight, index, whole, depth, more, output, rows,
                                             depth, width);
            default:
                return multiply<ROWS, Single>(weight, index, whole, depth, more, output, rows,
                                              depth, width);
        }
    }
};

inline int64_t panels_of(const Weight& weight) { return (weight.columns + COLUMNS - 1) / COLUMNS; }

// Layers of the same input [rows, depth], their results side by side in output [rows, width], plus
// `more` of the same shape, or null.
struct Product {
    const Weight* weights;
    int64_t count;
    const float *input, *more;
    float* output;
    int64_t depth;
    int64_t panels = 0, width = 0;
    bool narrows = false;  // any of them is of format 3

    Product(const Weight* weights, int64_t count, const float* input, const float* more,
            float* output, int64_t depth)
        : weights(weights), count(count), input(input), more(more), output(output), depth(depth) {
        for (int64_t i = 0; i < count; ++i) {
            panels += panels_of(weights[i]), width += weights[i].columns;
            narrows |= weights[i].format == 3;
        }
    }

    // The columns of some panels, of some rows.
    void make(int64_t index, int64_t panels, int64_t row, int64_t rows) const {
        int64_t at = row * width;
        const Weight* weight = weights;
        const Input own(narrows, input + row * depth, rows, depth);
        for (; panels > 0; --panels, ++index) {
            for (; index >= panels_of(*weight); ++weight) {
                index -= panels_of(*weight);
                at += weight->columns;
            }
            own.multiply_by(*weight, index, more ? more + at : nullptr, output + at, rows, width);
        }
    }
};

// All of it, by some threads.
inline void make(const Product& product, int64_t rows, int threads) {
    const int64_t blocks = (rows + HEIGHT - 1) / HEIGHT;
    const int64_t wanted = product.panels * blocks / (threads * SHARES);
    const int64_t some = std::clamp<int64_t>(wanted, 1, product.panels);
    const int64_t groups = (product.panels + some - 1) / some;
    carpool::pool().run(blocks * groups, threads, [&](int64_t share) {
        const int64_t block = share / groups, index = share % groups * some;
        const int64_t row = block * rows / blocks, end = (block + 1) * rows / blocks;
        product.make(index, std::min(some, product.panels - index), row, end - row);
    });
}

}  // namespace
