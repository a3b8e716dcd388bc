// A linear layer on a host: rows [rows, depth] times a weight [columns, depth], plus a bias.
//
// Its weight lies in the panels of `panels.h`; `linear.py` lays them out. A result depends neither on
// the other rows nor on threads.

#include "panels.h"

extern "C" int carpool_reads_float16() {
#ifdef __F16C__
    return 1;
#else
    return 0;
#endif
}

// Whether the processor multiplies bfloat16, and format 3 is there.
extern "C" int carpool_multiplies_bfloat16() {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

// `count` layers of the same input [rows, depth], their results side by side in output [rows, all
// columns], plus `more` of the same shape, or null. Panels are [panels, depth, 16]; those of
// bfloat16 in the order of `Brain` or `Dots`.
extern "C" void carpool_linear(const Weight* weights, int64_t count, const float* input,
                               const float* more, float* output, int64_t rows, int64_t depth,
                               int threads) {
    make({weights, count, input, more, output, depth}, rows, threads);
}
