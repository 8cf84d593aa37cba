// Vectors of W floats, for AVX-512, for AVX2 with FMA, and in general code for other processors. The compiler must not
// contract products and sums by itself (-ffp-contract=off): a function gives the same bits wherever it is inlined.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace megarl {

#if defined(__AVX512F__) && defined(__AVX512DQ__)

constexpr int W = 16;
using Vec = __m512;

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const float* p, int n) { return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p); }  // 0 < n < W
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline void store(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), x); }
inline Vec all(float x) { return _mm512_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }  // a · b + c, rounded once
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b if one is NaN, as in min
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec times_power_of_2(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
inline Vec zero_below(Vec x, float limit, Vec y) {  // y where x ≥ limit, else 0
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(limit), _CMP_NLT_UQ), y);
}
inline Vec first(int n, Vec x, Vec other) {  // the first n elements of x, then those of `other`
    return _mm512_mask_mov_ps(other, __mmask16((1u << n) - 1), x);
}

inline Vec quarters(const float* const* rows, int64_t at) {  // elements at … at + 3 of rows 0, 4, 8 and 12
    auto lane = [&](int j) { return _mm_loadu_ps(rows[4 * j] + at); };
    Vec found = _mm512_insertf32x4(_mm512_castps128_ps512(lane(0)), lane(1), 1);
    return _mm512_insertf32x4(_mm512_insertf32x4(found, lane(2), 2), lane(3), 3);
}
inline Vec unpack_low(Vec a, Vec b) { return _mm512_unpacklo_ps(a, b); }  // in each lane of 4, as the next three
inline Vec unpack_high(Vec a, Vec b) { return _mm512_unpackhi_ps(a, b); }
inline Vec low_halves(Vec a, Vec b) { return _mm512_shuffle_ps(a, b, 0x44); }
inline Vec high_halves(Vec a, Vec b) { return _mm512_shuffle_ps(a, b, 0xEE); }

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int W = 8;
using Vec = __m256;

inline __m256i mask_of(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const float* p, int n) { return _mm256_maskload_ps(p, mask_of(n)); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline void store(float* p, Vec x, int n) { _mm256_maskstore_ps(p, mask_of(n), x); }
inline Vec all(float x) { return _mm256_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec times_power_of_2(Vec x, Vec n) {  // for results that are normal numbers
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
inline Vec zero_below(Vec x, float limit, Vec y) {
    return _mm256_and_ps(y, _mm256_cmp_ps(x, all(limit), _CMP_NLT_UQ));
}
inline Vec first(int n, Vec x, Vec other) { return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(mask_of(n))); }

inline Vec quarters(const float* const* rows, int64_t at) {  // elements at … at + 3 of rows 0 and 4
    auto lane = [&](int j) { return _mm_loadu_ps(rows[4 * j] + at); };
    return _mm256_insertf128_ps(_mm256_castps128_ps256(lane(0)), lane(1), 1);
}
inline Vec unpack_low(Vec a, Vec b) { return _mm256_unpacklo_ps(a, b); }
inline Vec unpack_high(Vec a, Vec b) { return _mm256_unpackhi_ps(a, b); }
inline Vec low_halves(Vec a, Vec b) { return _mm256_shuffle_ps(a, b, 0x44); }
inline Vec high_halves(Vec a, Vec b) { return _mm256_shuffle_ps(a, b, 0xEE); }

#else

#define MEGARL_GENERAL_CODE
constexpr int W = 8;
using Vec [[gnu::vector_size(4 * W)]] = float;  // the compiler divides it into the processor's vectors
using Integers [[gnu::vector_size(4 * W)]] = int32_t;

inline Vec all(float x) { return x - Vec{}; }
inline Vec load(const float* p) {
    Vec x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline Vec load(const float* p, int n) {
    Vec x{};
    std::memcpy(&x, p, n * sizeof *p);
    return x;
}
inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
inline void store(float* p, Vec x, int n) { std::memcpy(p, &x, n * sizeof *p); }
inline Vec fma(Vec a, Vec b, Vec c) {
#ifdef __FP_FAST_FMAF
    for (int i = 0; i < W; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;  // rounded twice, wherever it is used
#endif
}
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
inline Vec round(Vec x) { return (x + all(12582912.0f)) - all(12582912.0f); }  // 1.5 · 2^23; for |x| < 2^22
inline Vec times_power_of_2(Vec x, Vec n) { return Vec(Integers(x) + (__builtin_convertvector(n, Integers) << 23)); }
inline Vec zero_below(Vec x, float limit, Vec y) { return x < all(limit) ? Vec{} : y; }
inline Vec first(int n, Vec x, Vec other) {
    for (int i = 0; i < n; ++i) other[i] = x[i];
    return other;
}

#endif

// GCC's vectors have these operators; names make call sites read alike.
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec zero() { return all(0.0f); }

// Elements start … start + W − 1 of W rows -> columns[i] holds element start + i of all rows. Inlined, `columns` stays in
// registers.
[[gnu::always_inline]] inline void transpose(const float* const* rows, int64_t start, Vec* columns) {
#ifdef MEGARL_GENERAL_CODE
    for (int c = 0; c < W; ++c)
        for (int r = 0; r < W; ++r) columns[c][r] = rows[r][start + c];
#else
    for (int c = 0; c < W; c += 4) {
        Vec r[4];
        for (int i = 0; i < 4; ++i) r[i] = quarters(rows + i, start + c);
        Vec low[2] = {unpack_low(r[0], r[1]), unpack_low(r[2], r[3])};
        Vec high[2] = {unpack_high(r[0], r[1]), unpack_high(r[2], r[3])};
        columns[c] = low_halves(low[0], low[1]), columns[c + 1] = high_halves(low[0], low[1]);
        columns[c + 2] = low_halves(high[0], high[1]), columns[c + 3] = high_halves(high[0], high[1]);
    }
#endif
}

// Elements in a fixed tree: halves are added until one number is left.
inline float sum(Vec x) {
    float v[W];
    store(v, x);
    for (int n = W / 2; n > 0; n /= 2)
        for (int i = 0; i < n; ++i) v[i] += v[i + n];
    return v[0];
}

inline float largest(Vec x) {
    float v[W];
    store(v, x);
    for (int n = W / 2; n > 0; n /= 2)
        for (int i = 0; i < n; ++i) v[i] = v[i] > v[i + n] ? v[i] : v[i + n];
    return v[0];
}

// e^x = 2^n · (1 + q): writes n, a whole number, and returns q.
inline Vec reduced_exp(Vec x, Vec& n) {
    n = round(mul(x, all(1.44269504f)));
    Vec r = fma(n, all(-0.693145752f), x);  // ln 2 in two parts, the first of which has zeros in its last bits
    r = fma(n, all(-1.42860677e-6f), r);
    Vec p = all(1.98756918e-4f);  // minimax polynomial of (e^r − 1 − r) / r² on ±ln 2 / 2
    p = fma(p, r, all(1.39819994e-3f));
    p = fma(p, r, all(8.33345205e-3f));
    p = fma(p, r, all(4.16657962e-2f));
    p = fma(p, r, all(1.66666657e-1f));
    p = fma(p, r, all(5.0e-1f));
    return fma(p, mul(r, r), r);
}

// e^x for x ≤ 88, within 2 units in the last place; 0 below the smallest normal result; NaN for NaN.
inline Vec exp(Vec x) {
    const float smallest = -87.33654f;
    Vec n, p = add(reduced_exp(x, n), all(1.0f));
    return zero_below(x, smallest, times_power_of_2(p, max(n, all(-126.0f))));
}

// tanh x = (e^2x − 1) / (e^2x + 1), within 4 units in the last place; NaN for NaN. The numerator is no difference of
// rounded numbers, which would lose small x.
inline Vec tanh(Vec x) {
    const float largest = 20.0f;  // 2x from which the result is 1
    Vec n, q = reduced_exp(max(all(-largest), min(all(largest), add(x, x))), n), power = times_power_of_2(all(1.0f), n);
    Vec e = fma(q, power, sub(power, all(1.0f)));
    return div(e, add(e, all(2.0f)));
}

}  // namespace megarl
