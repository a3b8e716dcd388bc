// What lies between linear layers, each in one pass: norms of rows, and a gate on its way through
// SiLU. A row's result depends on that row alone. Widths are multiples of 8.

#include <algorithm>
#include <cmath>

#include "lanes.h"
#include "pool.h"

namespace {

constexpr int64_t SHARE = 1 << 15;  // numbers that are worth a thread

}  // namespace

// Root mean square norm (Zhang and Sennrich 2019): rows [rows, width] times weight [width].
extern "C" void carpool_rms_norm(const float* input, const float* weight, float* output,
                                 int64_t rows, int64_t width, float epsilon) {
    for (int64_t row = 0; row < rows; ++row) {
        const float* from = input + row * width;
        Lane squares = {};
        for (int64_t d = 0; d < width; d += LANE) squares += load(from + d) * load(from + d);
        const float scale = 1.0f / std::sqrt(sum(squares) / width + epsilon);
        float* to = output + row * width;
        for (int64_t d = 0; d < width; d += LANE)
            store(to + d, load(from + d) * scale * load(weight + d));
    }
}

// silu(gate) * up of `count` numbers.
extern "C" void carpool_gated(const float* gate, const float* up, float* output, int64_t count,
                              int threads) {
    const int64_t shares = (count + SHARE - 1) / SHARE;
    carpool::pool().run(shares, threads, [&](int64_t share) {
        const int64_t end = std::min(count, (share + 1) * SHARE);
        for (int64_t at = share * SHARE; at < end; at += LANE) {
            const Lane x = load(gate + at);
            const Lane power = exponential(x < 0.0f ? x : -x);
            const Lane part = (x < 0.0f ? power : Lane{} + 1.0f) / (1.0f + power);
            store(output + at, x * part * load(up + at));
        }
    });
}
