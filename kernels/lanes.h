// Eight numbers at a time, in the vector extensions that GCC and clang share.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace {

typedef float Lane __attribute__((vector_size(32)));
typedef int32_t Whole __attribute__((vector_size(32)));

constexpr int64_t LANE = 8;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

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

inline float largest(Lane of) {
    float found = of[0];
    for (int i = 1; i < LANE; ++i) found = found < of[i] ? of[i] : found;
    return found;
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

// x / 2 * (1 + erf(x / sqrt(2))), erf as a quotient of polynomials as Eigen has it, which is
// accurate to the last bits of a float.
inline Lane gelu(Lane x) {
    Lane z = x * 0.70710678118654752f;
    z = z > 4.0f ? Lane{} + 4.0f : z < -4.0f ? Lane{} - 4.0f : z;  // beyond it is 1; NaN stays
    const Lane s = z * z;
    Lane p = s * -2.72614225801306e-10f + 2.77068142495902e-8f;
    p = p * s - 2.10102402082508e-6f;
    p = p * s - 5.69250639462346e-5f;
    p = p * s - 7.34990630326855e-4f;
    p = p * s - 2.95459980854025e-3f;
    p = p * s - 1.60960333262415e-2f;
    Lane q = s * -1.45660718464996e-5f - 2.13374055278905e-4f;
    q = q * s - 1.68282697438203e-3f;
    q = q * s - 7.37332916720468e-3f;
    q = q * s - 1.42647390514189e-2f;
    return x * 0.5f * (1.0f + z * p / q);
}

}  // namespace
