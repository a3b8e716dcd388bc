// What lies between linear layers, each in one pass: norms of rows, a gate on its way through SiLU,
// and rotation by position. A row's result depends on that row alone. Widths of the first two are
// multiples of 8.

#include <algorithm>
#include <cmath>

#include "lanes.h"
#include "pool.h"

namespace {

constexpr int64_t SHARE = 1 << 13;  // numbers that are worth a thread

// Calls work(row) for all rows, of `width` numbers each.
template <class Work>
void each_row(int64_t rows, int64_t width, int threads, const Work& work) {
    const int64_t some = std::max<int64_t>(SHARE / width, 1);
    carpool::pool().run((rows + some - 1) / some, threads, [&](int64_t share) {
        const int64_t end = std::min(rows, (share + 1) * some);
        for (int64_t row = share * some; row < end; ++row) work(row);
    });
}

}  // namespace

// Root mean square norm (Zhang and Sennrich 2019): rows [rows, width] times weight [width].
extern "C" void carpool_rms_norm(const float* input, const float* weight, float* output,
                                 int64_t rows, int64_t width, float epsilon, int threads) {
    each_row(rows, width, threads, [&](int64_t row) {
        const float* from = input + row * width;
        Lane squares = {};
        for (int64_t d = 0; d < width; d += LANE) squares += load(from + d) * load(from + d);
        const float scale = 1.0f / std::sqrt(sum(squares) / width + epsilon);
        float* to = output + row * width;
        for (int64_t d = 0; d < width; d += LANE)
            store(to + d, load(from + d) * scale * load(weight + d));
    });
}

// silu(gate) * up of rows [rows, 2, width], first the gate and then what it lets through.
extern "C" void carpool_gated(const float* input, float* output, int64_t rows, int64_t width,
                              int threads) {
    each_row(rows, width, threads, [&](int64_t row) {
        const float *gate = input + row * 2 * width, *up = gate + width;
        for (int64_t d = 0; d < width; d += LANE) {
            const Lane x = load(gate + d);
            const Lane power = exponential(x < 0.0f ? x : -x);
            const Lane part = (x < 0.0f ? power : Lane{} + 1.0f) / (1.0f + power);
            store(output + row * width + d, x * part * load(up + d));
        }
    });
}

// Rotary positions (Su et al. 2021) in place: heads [tokens, heads, width], a token `stride`
// numbers after the one before; cosines and sines [tokens, width], of which both halves are used.
extern "C" void carpool_rotate(float* heads, const float* cosines, const float* sines,
                               int64_t tokens, int64_t count, int64_t width, int64_t stride,
                               int threads) {
    const int64_t half = width / 2;
    each_row(tokens, count * width, threads, [&](int64_t token) {
        const float *cosine = cosines + token * width, *sine = sines + token * width;
        for (int64_t head = 0; head < count; ++head) {
            float* __restrict__ low = heads + token * stride + head * width;
            float* __restrict__ high = low + half;
            for (int64_t d = 0; d < half; ++d) {
                const float x = low[d], y = high[d];
                low[d] = x * cosine[d] - y * sine[d];
                high[d] = y * cosine[half + d] + x * sine[half + d];
            }
        }
    });
}
