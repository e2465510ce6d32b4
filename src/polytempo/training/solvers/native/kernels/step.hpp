// How weights move: the objective's pull, weight decay, the mask, the optimiser, in one pass.
#pragma once
#include "vector.hpp"

enum Optimiser { SGD, ADAM, ADAMW, GRADIENT };
enum Objective { PLAIN, PROXIMAL, UNSQUARED, COSINE, INNER, L1, L2, DRIFT };

// Every vector of numbers (moments, anchor, mask) stands `SIZE` after the one before, beginning with
// the weights themselves: how far after a weight its companions are.
struct Step {
    int optimiser;
    bool pulled, masked;
    float lr, momentum, decay;               // momentum: of Adam, 1 - beta1
    float beta2, rest2, epsilon, first, second; // Adam: rest2 = 1 - beta2, 1 - beta1^t, 1 - beta2^t
    float u, v, away, sign;                  // the objective: u w + v a + away (w - a) + sign sgn(w - a)
    long moment, anchor, moment2, mask;
};

INLINE void move(const Step &s, v8 g, float *w)
{
    const v8 old = ld(w);
    if (s.pulled) {
        const v8 a = ld(w + s.anchor), d = old - a;
        g += bc(s.u) * old + bc(s.v) * a + bc(s.away) * d;
        if (s.sign != 0) g += (v8)((i8)bc(s.sign) & (d > bc(0))) - (v8)((i8)bc(s.sign) & (d < bc(0)));
    }
    if (s.optimiser != ADAMW) g += bc(s.decay) * old;
    if (s.masked) g = (v8)((i8)g & *(const i8u *)(w + s.mask));
    float *m = w + s.moment;
    if (s.optimiser == SGD) {
        const v8 mm = ld(m) * bc(s.momentum) + g;
        const v8 now = old - bc(s.lr) * mm;
        st(m, mm);
        st(w, s.masked ? pick(*(const i8u *)(w + s.mask), now, old) : now); // momentum may be kept
        return;
    }
    if (s.optimiser == GRADIENT) {
        st(m, g);
        return;
    }
    float *q = w + s.moment2;
    const v8 mm = ld(m) + (g - ld(m)) * bc(s.momentum);
    const v8 qq = ld(q) * bc(s.beta2) + g * g * bc(s.rest2);
    st(m, mm), st(q, qq);
    v8 now = s.optimiser == ADAMW ? old * bc(1 - s.lr * s.decay) : old;
    now -= bc(s.lr / s.first) * mm / (sqrt8(qq / bc(s.second)) + bc(s.epsilon));
    st(w, s.masked ? pick(*(const i8u *)(w + s.mask), now, old) : now);
}

INLINE void move_all(const Step &s, long n, const float *g, float *w)
{
    for (long k = 0; k < n; k += 8) move(s, ld(g + k), w + k);
}

// The runs [from[k], to[k]) of weights that the objective looks at.
struct Runs {
    long count;
    const int64_t *from, *to;
};
template <class Sum> INLINE double over(const Runs &r, Sum sum)
{
    double found = 0;
    for (long k = 0; k < r.count; k++) found += sum(r.from[k], r.to[k] - r.from[k]);
    return found;
}

// Of the weights and the anchor, with themselves and each other.
struct Products {
    double ww, wa, aa;
};
static Products products(const Runs &r, const float *w, const float *a)
{
    const auto product = [&](const float *x, const float *y) {
        return over(r, [&](long at, long n) { return dot(n, x + at, y + at); });
    };
    return {product(w, w), product(w, a), product(a, a)};
}

// Objectives that these are all they need of the vectors.
INLINE bool by_products(int objective)
{
    return objective == PLAIN || objective == PROXIMAL || objective == COSINE || objective == INNER;
}
static void pull_by(int objective, float strength, const Products &p, Step &s)
{
    s.u = s.v = s.away = s.sign = 0;
    s.pulled = objective != PLAIN;
    if (objective == PROXIMAL) s.away = strength;
    if (objective == INNER) s.v = -strength / fmax(p.aa, 1e-12);
    if (objective == COSINE) {
        const double scale = sqrt(p.ww) * sqrt(p.aa), inverse = scale > 0 ? strength / scale : 0;
        s.u = inverse * p.wa / fmax(p.ww, 1e-30), s.v = -inverse; // zero has cosine 0
    }
}

// What the objective adds to the gradient at w.
static void pull(int objective, float strength, const Runs &r, const float *w, Step &s)
{
    const float *a = w + s.anchor;
    if (by_products(objective)) {
        const bool needed = objective == COSINE || objective == INNER;
        return pull_by(objective, strength, needed ? products(r, w, a) : Products{}, s);
    }
    s.u = s.v = s.away = s.sign = 0;
    s.pulled = true;
    const double apart = sqrt(over(r, [&](long at, long n) { return distance(n, w + at, a + at); }));
    const double length = sqrt(over(r, [&](long at, long n) { return dot(n, a + at, a + at); }));
    if (objective == DRIFT) s.v = 1;
    if (objective == UNSQUARED) s.away = strength / fmax(apart, 1e-12);
    if (objective == L2) s.away = strength / fmax(apart * length, 1e-12);
    if (objective == L1)
        s.sign = strength / fmax(over(r, [&](long at, long n) { return length1(n, a + at); }), 1e-12);
}
