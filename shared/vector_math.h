// Numbers eight at a time, and functions that the compiler can turn into vector instructions, which a call of the C
// library prevents.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// Eight numbers in one register; the compiler splits or joins them where the processor's registers have another size.
typedef float Vector __attribute__((vector_size(32)));

inline Vector load(const float* p) {
    Vector v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void save(float* p, Vector v) { std::memcpy(p, &v, sizeof v); }

inline float sum(Vector v) {
    return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
}

// exp(x) within 2 units in the last place: 2^n * exp(r) with |r| <= ln(2)/2, and exp(r) by its Taylor polynomial.
inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;  // written so that NaN stays NaN
    x = x < -87.0f ? -87.0f : x;
    const float n = std::nearbyint(x * 1.44269504f);                  // 1 / ln(2)
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;     // ln(2) in two parts, the first exact
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;  // the float 2^n
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}
