// Fully connected layers, a whole batch at a time. Rows of x and of weights are IP numbers apart,
// rows of y OP: multiples of eight, and what lies behind the real numbers is zero.
#pragma once
#include "step.hpp"

INLINE v8 pairs(v8 a, v8 b)
{
    return SHUFFLE(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + SHUFFLE(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}
INLINE v4 totals(v8 a, v8 b, v8 c, v8 d)
{
    v8 s = pairs(pairs(a, b), pairs(c, d));
    return HALF(s, 0) + HALF(s, 1);
}

// M samples, 4 outputs: sums over the inputs in the lanes of 4 M registers.
template <int M>
TILE void dense_tile(long IP, long OP, bool relu, const float *x, const float *w, const float *bias,
                     float *y)
{
    v8 acc[M * 4];
    EACH(k, M * 4) acc[k] = bc(0);
    const float *x1 = x + IP, *x2 = x + 2 * IP, *w1 = w + IP, *w2 = w + 2 * IP, *w3 = w + 3 * IP;
    for (long k = 0; k < IP; k += 8) {
        v8 a[M];
        a[0] = ldm(x + k);
        if (M > 1) a[M > 1 ? 1 : 0] = ldm(x1 + k);
        if (M > 2) a[M > 2 ? 2 : 0] = ldm(x2 + k);
        v8 b = ldm(w + k);
        EACH(m, M) acc[m * 4] = fma8(acc[m * 4], a[m], b);
        b = ldm(w1 + k);
        EACH(m, M) acc[m * 4 + 1] = fma8(acc[m * 4 + 1], a[m], b);
        b = ldm(w2 + k);
        EACH(m, M) acc[m * 4 + 2] = fma8(acc[m * 4 + 2], a[m], b);
        b = ldm(w3 + k);
        EACH(m, M) acc[m * 4 + 3] = fma8(acc[m * 4 + 3], a[m], b);
    }
    EACH(m, M) {
        v4 s = totals(acc[m * 4], acc[m * 4 + 1], acc[m * 4 + 2], acc[m * 4 + 3]) + *(const v4u *)bias;
        if (relu) s = (v4)((i4)s & ~(s < (v4){0, 0, 0, 0}));
        *(v4u *)(y + m * OP) = s;
    }
}

// y = relu(x w' + bias): x [n][IP], w [O, rounded up to 4][IP], y [n][OP]. Some samples at a time, so
// that they stay in the nearest cache while the weights pass; or, if they are long, all of them, while
// four rows of weights stay.
static void dense_forward(long n, long IP, long O, bool relu, const float *x, const float *w,
                          const float *bias, float *y)
{
    const long OP = up(O), some = 6144 / IP >= 12 ? 6144 / IP / 3 * 3 : n;
    for (; n > 0; n -= some, x += some * IP, y += some * OP)
        for (long o = 0, count = n < some ? n : some; o < O; o += 4) {
            const float *wo = w + o * IP, *bo = bias + o;
            float *yo = y + o;
            long m = 0;
            for (; count - m > 4 || count - m == 3; m += 3)
                dense_tile<3>(IP, OP, relu, x + m * IP, wo, bo, yo + m * OP);
            for (; count - m > 1; m += 2) dense_tile<2>(IP, OP, relu, x + m * IP, wo, bo, yo + m * OP);
            if (count - m) dense_tile<1>(IP, OP, relu, x + m * IP, wo, bo, yo + m * OP);
        }
}

// What becomes of c [M][8 V], with the sum over k < L of a(m, k) * b [k][8 V]: it is the sum, or that is
// added, or c are weights that are moved by it. Rows of b are BS apart, of c CS.
enum Way { STORED, ADDED, MOVED };
template <int M, int V, Way way>
TILE void outer_tile(long L, long am, long ak, long BS, long CS, const float *a, const float *b,
                     float *c, const Step *s)
{
    v8 acc[M * V];
    EACH(m, M) EACH(v, V) acc[m * V + v] = way == ADDED ? ld(c + m * CS + 8 * v) : bc(0);
    for (long k = 0; k < L; k++, a += ak, b += BS) {
        v8 bv[V];
        EACH(v, V) bv[v] = ldm(b + 8 * v);
        const float *am_ = a;
        EACH(m, M) {
            v8 f = bcm(am_);
            am_ += am;
            EACH(v, V) acc[m * V + v] = fma8(acc[m * V + v], f, bv[v]);
        }
    }
    if (way == MOVED) { // by way of memory: inlined into this function, it would crowd the loop's registers
        float sum[M * V * 8] __attribute__((aligned(64)));
        EACH(k, M * V) st(sum + 8 * k, acc[k]);
        __asm__ volatile("" ::: "memory");
        for (int m = 0; m < M; m++)
            for (int v = 0; v < V; v++) move(*s, ld(sum + 8 * (m * V + v)), c + m * CS + 8 * v);
    } else
        EACH(m, M) EACH(v, V) st(c + m * CS + 8 * v, acc[m * V + v]);
}

template <int M, Way way>
INLINE void outer_rows(long VV, long L, long am, long ak, long BS, long CS, const float *a,
                       const float *b, float *c, const Step *s)
{
    long v = 0;
    for (; v + 2 <= VV; v += 2)
        outer_tile<M, 2, way>(L, am, ak, BS, CS, a, b + 8 * v, c + 8 * v, s);
    if (v < VV) outer_tile<M, 1, way>(L, am, ak, BS, CS, a, b + 8 * v, c + 8 * v, s);
}

template <Way way>
static void outer(long M, long VV, long L, long am, long ak, long BS, long CS, const float *a,
                  const float *b, float *c, const Step *s)
{
    for (; M >= 6; M -= 6, a += 6 * am, c += 6 * CS) outer_rows<6, way>(VV, L, am, ak, BS, CS, a, b, c, s);
    for (; M >= 3; M -= 3, a += 3 * am, c += 3 * CS) outer_rows<3, way>(VV, L, am, ak, BS, CS, a, b, c, s);
    for (; M >= 1; M -= 1, a += 1 * am, c += 1 * CS) outer_rows<1, way>(VV, L, am, ak, BS, CS, a, b, c, s);
}

// dx [n][IP] = dy w.
static void dense_data_backward(long n, long IP, long O, const float *dy, const float *w, float *dx)
{
    outer<STORED>(n, IP / 8, O, up(O), 1, IP, IP, dy, w, dx, 0);
}

// Weights moved by dy' x. The gradient is not stored, unless there are so many samples that they are
// added up in `room`, some at a time.
static void dense_step(long n, long IP, long O, const float *x, const float *dy, const Step &s, float *w,
                       float *room)
{
    const long some = 256, OP = up(O);
    if (n <= 2 * some) {
        outer<MOVED>(O, IP / 8, n, 1, OP, IP, IP, dy, x, w, &s);
        return;
    }
    memset(room, 0, 4 * O * IP);
    for (; n > 0; n -= some, x += some * IP, dy += some * OP)
        outer<ADDED>(O, IP / 8, n < some ? n : some, 1, OP, IP, IP, dy, x, room, 0);
    move_all(s, O * IP, room, w);
}

// Biases moved by the sum of dy.
static void bias_step(long n, long O, const float *dy, const Step &s, float *bias)
{
    const long OP = up(O);
    for (long o = 0; o < OP; o += 8) {
        v8 sum = bc(0);
        for (long k = 0; k < n; k++) sum += ld(dy + k * OP + o);
        move(s, sum, bias + o);
    }
}
