// Eight numbers at a time, in the vector extensions that GCC and clang share.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

typedef float Lane __attribute__((vector_size(32)));
typedef int32_t Whole __attribute__((vector_size(32)));

constexpr int64_t LANE = 8;

template <class Lanes = Lane, class Number>
inline Lanes load(const Number* from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

inline void store(float* to, Lane lane) { std::memcpy(to, &lane, sizeof lane); }

inline float sum(Lane of) {
    return ((of[0] + of[4]) + (of[1] + of[5])) + ((of[2] + of[6]) + (of[3] + of[7]));
}

// exp(x) for x <= 0: powers of two and Cephes' polynomial, so that it is done in lanes.
inline Lane exponential(Lane x) {
    const Whole nothing = x < -87.0f;
    x = nothing ? Lane{} : x;
    const Whole power = __builtin_convertvector(x * 1.44269504088896341f - 0.5f, Whole);
    const Lane n = __builtin_convertvector(power, Lane);
    const Lane r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Lane p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return nothing ? Lane{} : p * reinterpret_cast<Lane>((power + 127) << 23);
}

}  // namespace
