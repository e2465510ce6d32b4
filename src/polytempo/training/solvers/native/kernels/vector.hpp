// Vectors of eight numbers (in tiles of sixteen, where the CPU has such), and what keeps compilers from
// taking tiles of them apart.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef float v8 __attribute__((vector_size(32)));
typedef float v16 __attribute__((vector_size(64)));
typedef float v4 __attribute__((vector_size(16)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef float v8u __attribute__((vector_size(32), aligned(4), may_alias));
typedef float v16u __attribute__((vector_size(64), aligned(4), may_alias));
typedef float v4u __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t i8u __attribute__((vector_size(32), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
// A tile of sums in registers is a function of its own, never inlined: compilers then have no other
// variables to make room for.
#define TILE static __attribute__((noinline))
#if defined(__clang__)
#define EACH(i, n) _Pragma("clang loop unroll(full)") for (int i = 0; i < (n); i++)
#else
#define EACH(i, n) _Pragma("GCC unroll 64") for (int i = 0; i < (n); i++)
#endif
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define HALF(a, k) __builtin_shufflevector(a, a, 4 * (k), 4 * (k) + 1, 4 * (k) + 2, 4 * (k) + 3)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i8){__VA_ARGS__})
#define HALF(a, k) ((v4){a[4 * (k)], a[4 * (k) + 1], a[4 * (k) + 2], a[4 * (k) + 3]})
#endif

constexpr int up(int n, int to = 8) { return (n + to - 1) / to * to; }

INLINE v8 ld(const float *p) { return *(const v8u *)p; }
INLINE void st(float *p, v8 a) { *(v8u *)p = a; }
INLINE v8 bc(float a) { return (v8){a, a, a, a, a, a, a, a}; }
INLINE i8 bi(int32_t a) { return (i8){a, a, a, a, a, a, a, a}; }
INLINE v8 pick(i8 m, v8 a, v8 b) { return (v8)((m & (i8)a) | (~m & (i8)b)); }
INLINE i8 picki(i8 m, i8 a, i8 b) { return (m & a) | (~m & b); }
INLINE v8 relu8(v8 a) { return pick(a < bc(0), bc(0), a); } // NaN stays NaN
INLINE v8 magnitude(v8 a) { return (v8)((i8)a & bi(0x7fffffff)); }

// Vectors of tiles: of L numbers, 8 or (with AVX-512) 16.
#if defined(__AVX512F__) && defined(__AVX512VL__) && !defined(PLAIN_VECTORS)
enum { WIDEST = 16, REGISTERS = 32 };
#define VECTOR "v" // any of 32 registers
#else
enum { WIDEST = 8, REGISTERS = 16 };
#define VECTOR "x"
#endif
template <int L> struct Lanes;
template <> struct Lanes<8> {
    typedef v8 vector;
    typedef v8u loose;
};
template <> struct Lanes<16> {
    typedef v16 vector;
    typedef v16u loose;
};
template <int L> using Vector = typename Lanes<L>::vector;
template <int L> using Loose = typename Lanes<L>::loose;
template <int L> INLINE void put(float *p, Vector<L> a) { *(Loose<L> *)p = a; }
template <int L> INLINE Vector<L> zero() { return Vector<L>{}; }
INLINE v8 low(v8 a) { return a; }
#if defined(__AVX512F__)
INLINE v8 low(v16 a) { return (v8)_mm512_castps512_ps256((__m512)a); }
INLINE v16 twice(const float *p) // eight numbers
{
    return (v16)_mm512_castpd_ps(_mm512_broadcast_f64x4(_mm256_castps_pd(_mm256_loadu_ps(p))));
}
INLINE v16 halves(const float *p, int apart) // two numbers, eight times each
{
    return (v16)_mm512_mask_broadcastss_ps(_mm512_set1_ps(*p), 0xff00, _mm_load_ss(p + apart));
}
INLINE v8 folded(v16 a) // its two halves, added
{
    return low(a) + low((v16)_mm512_shuffle_f32x4((__m512)a, (__m512)a, 0xee));
}
#endif
INLINE v8 folded(v8 a) { return a; }

// acc + a * b, also with b from memory; loads that stay where they are written. Optimisers
// (predictive commoning, PRE, rematerialisation, CSE over unrolled loops) take register tiles
// apart, at two to four times the run time; they do not look into assembly.
#if defined(__FMA__) && defined(__AVX2__) && !defined(PLAIN_VECTORS)
template <int L> INLINE Vector<L> fma(Vector<L> acc, Vector<L> a, Vector<L> b)
{
    __asm__("vfmadd231ps %2, %1, %0" : "+" VECTOR(acc) : VECTOR(a), VECTOR(b));
    return acc;
}
template <int L> INLINE Vector<L> fmam(Vector<L> acc, Vector<L> a, const float *p)
{
    __asm__("vfmadd231ps %2, %1, %0" : "+" VECTOR(acc) : VECTOR(a), "m"(*(const Loose<L> *)p));
    return acc;
}
template <int L> INLINE Vector<L> ldm(const float *p)
{
    Vector<L> a;
    __asm__("vmovups %1, %0" : "=" VECTOR(a) : "m"(*(const Loose<L> *)p));
    return a;
}
template <int L> INLINE Vector<L> bcm(const float *p)
{
    Vector<L> a;
    __asm__("vbroadcastss %1, %0" : "=" VECTOR(a) : "m"(*p));
    return a;
}
#else
template <int L> INLINE Vector<L> fma(Vector<L> acc, Vector<L> a, Vector<L> b) { return acc + a * b; }
template <int L> INLINE Vector<L> fmam(Vector<L> acc, Vector<L> a, const float *p) { return acc + a * *(const Loose<L> *)p; }
template <int L> INLINE Vector<L> ldm(const float *p) { return *(const Loose<L> *)p; }
template <int L> INLINE Vector<L> bcm(const float *p) { return zero<L>() + *p; }
#endif

INLINE v8 sqrt8(v8 a)
{
    EACH(j, 8) a[j] = sqrtf(a[j]);
    return a;
}

INLINE float total(v8 a)
{
    return ((a[0] + a[4]) + (a[1] + a[5])) + ((a[2] + a[6]) + (a[3] + a[7]));
}

// exp, to two units in the last place; NaN stays NaN.
INLINE v8 exp8(v8 x)
{
    v8 y = pick(x > bc(88.3f), bc(88.3f), pick(x != x, bc(0), x));
    y = pick(y < bc(-87.3f), bc(-87.3f), y);
    const v8 shift = bc(12582912.0f); // 1.5 * 2^23: adding it rounds to a whole number
    v8 whole = (y * bc(1.44269504f) + shift) - shift;
    v8 r = y - whole * bc(0.693359375f);
    r = r - whole * bc(-2.12194440e-4f);
    v8 p = bc(1.9875691500e-4f);
    p = p * r + bc(1.3981999507e-3f);
    p = p * r + bc(8.3334519073e-3f);
    p = p * r + bc(4.1665795894e-2f);
    p = p * r + bc(1.6666665459e-1f);
    p = p * r + bc(5.0000001201e-1f);
    p = p * r * r + r + bc(1);
    i8 exponent;
    EACH(j, 8) exponent[j] = (int32_t)whole[j];
    v8 found = p * (v8)((exponent + bi(127)) << 23);
    return pick(x != x, x, found);
}

INLINE v8 tanh8(v8 x)
{
    v8 a = magnitude(x), square = x * x;
    v8 large = bc(1) - bc(2) / (exp8(bc(2) * a) + bc(1));
    large = (v8)((i8)large | ((i8)x & bi((int32_t)0x80000000)));
    v8 p = bc(-0.0088632355f); // Taylor's: 2^-24 of relative error below a quarter
    p = p * square + bc(0.0218694885f);
    p = p * square + bc(-0.0539682540f);
    p = p * square + bc(0.1333333333f);
    p = p * square + bc(-0.3333333333f);
    return pick(a < bc(0.25f), x + x * square * p, large);
}

// Abramowitz and Stegun 7.1.26: 1.5e-7 of absolute error. `gauss` is exp(-x^2).
INLINE v8 erf8(v8 x, v8 gauss)
{
    v8 t = bc(1) / (bc(1) + bc(0.3275911f) * magnitude(x));
    v8 p = bc(1.061405429f);
    p = p * t + bc(-1.453152027f);
    p = p * t + bc(1.421413741f);
    p = p * t + bc(-0.284496736f);
    p = p * t + bc(0.254829592f);
    v8 found = bc(1) - p * t * gauss;
    return (v8)((i8)found | ((i8)x & bi((int32_t)0x80000000)));
}

// Sums over n numbers, a multiple of eight: of a b, of |a|, of (a - b)^2.
template <class Term> INLINE double summed(long n, Term term)
{
    v8 s[4] = {bc(0), bc(0), bc(0), bc(0)};
    long k = 0;
    for (; k + 32 <= n; k += 32) EACH(j, 4) s[j] += term(k + 8 * j);
    for (; k < n; k += 8) s[0] += term(k);
    double found = 0;
    EACH(i, 4) EACH(j, 8) found += s[i][j];
    return found;
}
INLINE double dot(long n, const float *a, const float *b)
{
    return summed(n, [=](long k) { return ld(a + k) * ld(b + k); });
}
INLINE double length1(long n, const float *a)
{
    return summed(n, [=](long k) { return magnitude(ld(a + k)); });
}
INLINE double distance(long n, const float *a, const float *b)
{
    return summed(n, [=](long k) {
        v8 d = ld(a + k) - ld(b + k);
        return d * d;
    });
}
