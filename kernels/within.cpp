// Attention inside packed rows on a host: each row's queries over its own keys, and over those of a
// beginning that it shares.
//
// A row's keys and values are laid out as `panels.h` wants weights, once for all of its queries; so
// scores and results are its products. A query's result is a sum over its keys in one order: it
// depends neither on neighbours nor on threads, and a shared beginning changes no bit.
// `reference.py` says what is right; widths of values are multiples of 8.

#include <cmath>
#include <vector>

#include "panels.h"
#include "pool.h"

namespace {

struct Packed {
    // [tokens, heads, width], a token so many numbers after the one before
    const float *query, *key, *value;
    int64_t query_step, key_step, value_step;
    const float* sinks;  // [heads], or null
    float* out;          // [tokens, heads, value width]
    int64_t heads, key_heads, width, value_width;
    int64_t window;  // 0: none
    int64_t causal;  // 0: all of a row's keys are seen
    float scaling;
    float softcap;  // 0: none
};

struct Stretch {
    int32_t start, count, first, before;  // before: tokens of the beginning, from `first` on
};

// Eight keys' eight numbers from depth to lanes.
inline void turn(const float* const* from, int64_t d, float* to) {
    Lane rows[LANE], pairs[LANE], fours[LANE];
    for (int i = 0; i < LANE; ++i) rows[i] = load(from[i] + d);
    const Whole low = {0, 8, 1, 9, 4, 12, 5, 13}, high = {2, 10, 3, 11, 6, 14, 7, 15};
    for (int i = 0; i < LANE; i += 2) {
        pairs[i] = __builtin_shuffle(rows[i], rows[i + 1], low);
        pairs[i + 1] = __builtin_shuffle(rows[i], rows[i + 1], high);
    }
    const Whole even = {0, 1, 8, 9, 4, 5, 12, 13}, odd = {2, 3, 10, 11, 6, 7, 14, 15};
    for (int i = 0; i < LANE; i += 4)
        for (int j = 0; j < 2; ++j) {
            fours[i + 2 * j] = __builtin_shuffle(pairs[i + j], pairs[i + 2 + j], even);
            fours[i + 2 * j + 1] = __builtin_shuffle(pairs[i + j], pairs[i + 2 + j], odd);
        }
    const Whole front = {0, 1, 2, 3, 8, 9, 10, 11}, back = {4, 5, 6, 7, 12, 13, 14, 15};
    for (int i = 0; i < 4; ++i) {
        store(to + i * COLUMNS, __builtin_shuffle(fours[i], fours[i + 4], front));
        store(to + (i + 4) * COLUMNS, __builtin_shuffle(fours[i], fours[i + 4], back));
    }
}

// A stretch's queries of the heads that share a key head, with its keys and values laid out.
class Inside {
  public:
    Inside(const Packed& of, const Stretch& row, int64_t head)
        : of(of), row(row), head(head), group(of.heads / of.key_heads),
          length(row.before + row.count), panels((length + COLUMNS - 1) / COLUMNS),
          value_panels((of.value_width + COLUMNS - 1) / COLUMNS) {
        static thread_local std::vector<float> room;
        const int64_t keys_size = panels * COLUMNS * of.width;
        const int64_t values_size = value_panels * COLUMNS * length;
        const size_t size = keys_size + values_size + ROWS * (of.width + panels * COLUMNS);
        if (room.size() < size) room.resize(size);
        keys = room.data();
        values = keys + keys_size;
        query = values + values_size;
        scores = query + ROWS * of.width;
    }

    void run() {
        lay_keys();
        lay_values();
        const int64_t lines = row.count * group;  // a query of each head
        int64_t line = 0;
        for (int64_t tiles = (lines + ROWS - 1) / ROWS; tiles > 0; --tiles) {
            const int64_t some = (lines - line + tiles - 1) / tiles;
            tile_of<ROWS>(line, some);
            line += some;
        }
    }

  private:
    // The packed token of a key, by its place.
    int64_t token(int64_t place) const {
        return place < row.before ? row.first + place : row.start + place - row.before;
    }

    void lay_keys() {
        for (int64_t panel = 0; panel < panels; ++panel)
            for (int64_t half = 0; half < 2; ++half) {
                const float* from[LANE];
                for (int64_t i = 0; i < LANE; ++i) {  // what is beyond weighs nothing
                    const int64_t place = panel * COLUMNS + half * LANE + i;
                    from[i] = of.key + token(std::min(place, length - 1)) * of.key_step +
                              head * of.width;
                }
                float* to = keys + panel * COLUMNS * of.width + half * LANE;
                int64_t d = 0;
                for (; d + LANE <= of.width; d += LANE) turn(from, d, to + d * COLUMNS);
                for (; d < of.width; ++d)
                    for (int64_t i = 0; i < LANE; ++i) to[d * COLUMNS + i] = from[i][d];
            }
    }

    void lay_values() {
        for (int64_t place = 0; place < length; ++place) {
            const float* from = of.value + token(place) * of.value_step + head * of.value_width;
            for (int64_t d = 0; d < value_panels * COLUMNS; d += LANE)
                store(values + (d / COLUMNS * length + place) * COLUMNS + d % COLUMNS,
                      d < of.value_width ? load(from + d) : Lane{});
        }
    }

    template <int R>
    void tile_of(int64_t line, int64_t some) {
        if (some == R) return tile<R>(line);
        if constexpr (R > 1) tile_of<R - 1>(line, some);
    }

    // The keys that a line's query sees.
    int64_t end(int64_t line) const { return of.causal ? row.before + line / group + 1 : length; }
    int64_t begin(int64_t line) const {
        return of.window ? std::max<int64_t>(end(line) - of.window, 0) : 0;
    }

    template <int R>
    void tile(int64_t line) {
        for (int r = 0; r < R; ++r) {
            const float* own = of.query + (row.start + (line + r) / group) * of.query_step +
                               (head * group + (line + r) % group) * of.width;
            for (int64_t d = 0; d < of.width; ++d) query[r * of.width + d] = own[d] * of.scaling;
        }
        const int64_t stride = panels * COLUMNS, from = begin(line) / COLUMNS;
        const int64_t to = end(line + R - 1), last = (to + COLUMNS - 1) / COLUMNS;
        Lane most[R];
        for (int r = 0; r < R; ++r) most[r] = Lane{} + sink(line + r);
        for (int64_t panel = from; panel < last; ++panel) score<R>(line, panel, stride, most);
        float whole[R];
        for (int r = 0; r < R; ++r)
            whole[r] = weigh(scores + r * stride, from * COLUMNS, last * COLUMNS, largest(most[r]),
                             sink(line + r));
        for (int64_t panel = 0; panel < value_panels; ++panel) {
            Lane totals[R][2] = {};
            sum_up<R>(values + panel * COLUMNS * length, length, scores, stride, from * COLUMNS, to,
                      totals);
            const int64_t d = panel * COLUMNS;
            const int64_t bytes = std::min(COLUMNS, of.value_width - d) * sizeof(float);
            for (int r = 0; r < R; ++r) {
                for (int i = 0; i < 2; ++i) totals[r][i] *= whole[r];
                const int64_t at = (row.start + (line + r) / group) * of.heads + head * group +
                                   (line + r) % group;
                std::memcpy(of.out + at * of.value_width + d, totals[r], bytes);
            }
        }
    }

    // The scores of R lines with a panel of keys; what a line does not see is NOTHING.
    template <int R>
    void score(int64_t line, int64_t panel, int64_t stride, Lane* most) const {
        Lane totals[R][2] = {};
        sum_up<R>(keys + panel * COLUMNS * of.width, of.width, query, of.width, 0, of.width, totals);
        const int64_t first = panel * COLUMNS;
        const bool seen = begin(line + R - 1) <= first && first + COLUMNS <= end(line);
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < 2; ++i) {
                Lane found = totals[r][i];
                if (of.softcap != 0.0f) found = capped(found);
                if (!seen) found = masked(found, line + r, first + i * LANE);
                store(scores + r * stride + first + i * LANE, found);
                most[r] = most[r] > found ? most[r] : found;
            }
    }

    Lane capped(Lane found) const {
        for (int i = 0; i < LANE; ++i) found[i] = std::tanh(found[i] / of.softcap) * of.softcap;
        return found;
    }

    Lane masked(Lane found, int64_t line, int64_t first) const {
        const Whole places = Whole{0, 1, 2, 3, 4, 5, 6, 7} + static_cast<int32_t>(first);
        const int32_t begins = begin(line), ends = end(line);
        return (places >= begins) & (places < ends) ? found : Lane{} + NOTHING;
    }

    float sink(int64_t line) const {
        return of.sinks ? of.sinks[head * group + line % group] : NOTHING;
    }

    template <int R>
    void sum_up(const float* panel, int64_t depth, const float* input, int64_t stride,
                int64_t first, int64_t last, Lane (*totals)[2]) const {
        const Panel<Single> own = {panel, nullptr, depth, COLUMNS, 0, false};
        for (; first < last; first = (first / PART + 1) * PART)
            add<R>(own, input, stride, first, std::min((first / PART + 1) * PART, last), totals);
    }

    // Makes a line's scores from `from` to `to` weights; 1 over their sum.
    float weigh(float* own, int64_t from, int64_t to, float highest, float sink) const {
        Lane total = {};
        for (int64_t k = from; k < to; k += LANE) {
            const Lane weight = exponential(load(own + k) - highest);
            store(own + k, weight);
            total += weight;
        }
        return 1.0f / (sum(total) + (of.sinks ? std::exp(sink - highest) : 0.0f));
    }

    const Packed& of;
    const Stretch& row;
    const int64_t head, group, length, panels, value_panels;
    float *keys, *values, *query, *scores;
};

}  // namespace

// What no stretch holds is left as it is.
extern "C" void carpool_attend_within(const Packed* packed, const Stretch* stretches, int64_t count,
                                      int threads) {
    carpool::pool().run(count * packed->key_heads, threads, [&](int64_t unit) {
        const Stretch& row = stretches[unit / packed->key_heads];
        if (row.count > 0) Inside(*packed, row, unit % packed->key_heads).run();
    });
}
