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

// The sums of M samples and 4 outputs over the inputs from `from` to `to`, in lanes.
template <int L, int M>
INLINE void dense_sums(long from, long to, long IP, const float *x, const float *w, Vector<L> *acc)
{
    const float *x1 = x + IP, *x2 = x + 2 * IP, *w1 = w + IP, *w2 = w + 2 * IP, *w3 = w + 3 * IP;
    for (long k = from; k < to; k += L) {
        Vector<L> a[M];
        a[0] = ldm<L>(x + k);
        if (M > 1) a[M > 1 ? 1 : 0] = ldm<L>(x1 + k);
        if (M > 2) a[M > 2 ? 2 : 0] = ldm<L>(x2 + k);
        Vector<L> b = ldm<L>(w + k);
        EACH(m, M) acc[m * 4] = fma<L>(acc[m * 4], a[m], b);
        b = ldm<L>(w1 + k);
        EACH(m, M) acc[m * 4 + 1] = fma<L>(acc[m * 4 + 1], a[m], b);
        b = ldm<L>(w2 + k);
        EACH(m, M) acc[m * 4 + 2] = fma<L>(acc[m * 4 + 2], a[m], b);
        b = ldm<L>(w3 + k);
        EACH(m, M) acc[m * 4 + 3] = fma<L>(acc[m * 4 + 3], a[m], b);
    }
}

// M samples, 4 outputs: sums over the inputs in the lanes of 4 M registers.
template <int M>
TILE void dense_tile(long IP, long OP, bool relu, const float *x, const float *w, const float *bias,
                     float *y)
{
    v8 acc[M * 4];
    long done = 0;
    if constexpr (WIDEST == 16) {
        Vector<WIDEST> wide[M * 4];
        EACH(k, M * 4) wide[k] = zero<WIDEST>();
        done = IP / 16 * 16;
        dense_sums<WIDEST, M>(0, done, IP, x, w, wide);
        EACH(k, M * 4) acc[k] = folded(wide[k]);
    } else
        EACH(k, M * 4) acc[k] = bc(0);
    dense_sums<8, M>(done, IP, IP, x, w, acc);
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

// What becomes of c [M][L V], with the sum over k < K of a(m, k) * b [k][L V]: it is the sum, or that is
// added, or c are weights that are moved by it. Rows of b are BS apart, of c CS.
enum Way { STORED, ADDED, MOVED };
template <int L, int M, int V, Way way>
TILE void outer_tile(long K, long am, long ak, long BS, long CS, const float *a, const float *b,
                     float *c, const Step *s)
{
    Vector<L> acc[M * V];
    EACH(m, M) EACH(v, V) acc[m * V + v] = way == ADDED ? ldm<L>(c + m * CS + L * v) : zero<L>();
    for (long k = 0; k < K; k++, a += ak, b += BS) {
        Vector<L> bv[V];
        EACH(v, V) bv[v] = ldm<L>(b + L * v);
        const float *am_ = a;
        EACH(m, M) {
            Vector<L> f = bcm<L>(am_);
            am_ += am;
            EACH(v, V) acc[m * V + v] = fma<L>(acc[m * V + v], f, bv[v]);
        }
    }
    if (way == MOVED) { // by way of memory: inlined into this function, it would crowd the loop's registers
        float sum[M * V * L] __attribute__((aligned(64)));
        EACH(k, M * V) put<L>(sum + L * k, acc[k]);
        __asm__ volatile("" ::: "memory");
        for (int m = 0; m < M; m++)
            for (int n = 0; n < V * L; n += 8) move(*s, ld(sum + m * V * L + n), c + m * CS + n);
    } else
        EACH(m, M) EACH(v, V) put<L>(c + m * CS + L * v, acc[m * V + v]);
}

template <int M, Way way>
INLINE void outer_rows(long N, long K, long am, long ak, long BS, long CS, const float *a,
                       const float *b, float *c, const Step *s)
{
    long n = 0;
    for (; n + 2 * WIDEST <= N; n += 2 * WIDEST)
        outer_tile<WIDEST, M, 2, way>(K, am, ak, BS, CS, a, b + n, c + n, s);
    if (n + WIDEST <= N) {
        outer_tile<WIDEST, M, 1, way>(K, am, ak, BS, CS, a, b + n, c + n, s);
        n += WIDEST;
    }
    if (n < N) outer_tile<8, M, 1, way>(K, am, ak, BS, CS, a, b + n, c + n, s);
}

// Rows of c are N numbers long.
template <Way way>
static void outer(long M, long N, long K, long am, long ak, long BS, long CS, const float *a,
                  const float *b, float *c, const Step *s)
{
    constexpr int most = (REGISTERS - 4) / 2;
    for (; M >= most; M -= most, a += most * am, c += most * CS)
        outer_rows<most, way>(N, K, am, ak, BS, CS, a, b, c, s);
    for (; M >= 3; M -= 3, a += 3 * am, c += 3 * CS) outer_rows<3, way>(N, K, am, ak, BS, CS, a, b, c, s);
    for (; M >= 1; M -= 1, a += 1 * am, c += 1 * CS) outer_rows<1, way>(N, K, am, ak, BS, CS, a, b, c, s);
}

// dx [n][IP] = dy w.
static void dense_data_backward(long n, long IP, long O, const float *dy, const float *w, float *dx)
{
    outer<STORED>(n, IP, O, up(O), 1, IP, IP, dy, w, dx, 0);
}

// Weights moved by dy' x. The gradient is not stored, unless there are so many samples that they are
// added up in `room`, some at a time.
static void dense_step(long n, long IP, long O, const float *x, const float *dy, const Step &s, float *w,
                       float *room)
{
    const long some = 256, OP = up(O);
    if (n <= 2 * some) {
        outer<MOVED>(O, IP, n, 1, OP, IP, IP, dy, x, w, &s);
        return;
    }
    memset(room, 0, 4 * O * IP);
    for (; n > 0; n -= some, x += some * IP, dy += some * OP)
        outer<ADDED>(O, IP, n < some ? n : some, 1, OP, IP, IP, dy, x, room, 0);
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
