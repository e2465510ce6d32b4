// Layers without matrices: activations, dropout, normalisation; and the losses.
#pragma once
#include "vector.hpp"

enum Activation { RELU, TANH, GELU, GELU_TANH };

struct Slope { // an activation and its derivative
    v8 value, slope;
};
INLINE Slope activation(int kind, v8 x)
{
    if (kind == RELU) return {relu8(x), (v8)((i8)bc(1) & (x > bc(0)))};
    if (kind == TANH) {
        const v8 y = tanh8(x);
        return {y, bc(1) - y * y};
    }
    if (kind == GELU) {
        const v8 bell = exp8(bc(-0.5f) * x * x);
        const v8 below = bc(0.5f) * (bc(1) + erf8(x * bc(0.70710678f), bell));
        return {x * below, below + x * bell * bc(0.39894228f)};
    }
    const v8 inner = bc(0.79788456f) * (x + bc(0.044715f) * x * x * x), t = tanh8(inner);
    const v8 steep = bc(0.79788456f) * (bc(1) + bc(3 * 0.044715f) * x * x);
    return {bc(0.5f) * x * (bc(1) + t), bc(0.5f) * (bc(1) + t) + bc(0.5f) * x * (bc(1) - t * t) * steep};
}
static void activate(int kind, long n, const float *x, float *y)
{
    for (long k = 0; k < n; k += 8) st(y + k, activation(kind, ld(x + k)).value);
}
static void activate_backward(int kind, long n, const float *x, const float *dy, float *dx)
{
    for (long k = 0; k < n; k += 8) st(dx + k, ld(dy + k) * activation(kind, ld(x + k)).slope);
}

// The gradient that reaches what came out of a ReLU: where it is positive. In place.
INLINE void mask_gradient(long n, const float *act, float *dact)
{
    for (long k = 0; k < n; k += 8) st(dact + k, (v8)((i8)ld(dact + k) & (ld(act + k) > bc(0))));
}

// n rows of `numbers` (`step` apart), times noise without padding; noise is null outside training.
static void drop(long n, long numbers, long step, const float *noise, const float *x, float *y)
{
    for (long m = 0; m < n; m++, x += step, y += step)
        for (long k = 0; k < numbers; k++) y[k] = noise ? x[k] * *noise++ : x[k];
}
// The same for an image: noise is [channel][pixel].
template <class P> static void drop_image(const float *noise, const float *x, float *y)
{
    for (int i = 0; i < P::H; i++)
        for (int j = 0; j < P::W; j++)
            for (int c = 0; c < P::C; c++) {
                const float value = x[i * P::ROW + j * P::S + c];
                y[i * P::OUT + j * P::S + c] = noise ? value * noise[(c * P::H + i) * P::W + j] : value;
            }
}
template <class P> static void drop_image_backward(const float *noise, const float *dy, float *dx)
{
    for (int i = 0; i < P::H; i++)
        for (int j = 0; j < P::W; j++)
            for (int c = 0; c < P::C; c++)
                dx[i * P::ROW + j * P::S + c] = dy[i * P::OUT + j * P::S + c] * noise[(c * P::H + i) * P::W + j];
}

template <class P> static void activate_image(int kind, const float *x, float *y)
{
    for (int i = 0; i < P::H; i++) activate(kind, P::W * P::S, x + i * P::ROW, y + i * P::OUT);
}
template <class P> static void activate_image_backward(int kind, const float *x, const float *dy, float *dx)
{
    for (int i = 0; i < P::H; i++)
        activate_backward(kind, P::W * P::S, x + i * P::ROW, dy + i * P::OUT, dx + i * P::ROW);
}

// Group normalisation of an image: H, W, C, S, ROW, OUT, and GROUPS of channels. `kept` [2][S] gets
// the mean and the inverse deviation of each channel's group.
template <class P> INLINE void by_group(float *sums)
{
    constexpr int SIZE = P::C / P::GROUPS;
    for (int g = 0; g < P::GROUPS; g++) {
        double sum = 0;
        for (int c = 0; c < SIZE; c++) sum += sums[g * SIZE + c];
        for (int c = 0; c < SIZE; c++) sums[g * SIZE + c] = sum / (SIZE * P::H * P::W);
    }
}
template <class P, class Use> INLINE void pixels(Use use)
{
    for (int i = 0; i < P::H; i++)
        for (int j = 0; j < P::W; j++)
            for (int q = 0; q < P::S; q += 8) use(i * P::ROW + j * P::S + q, i * P::OUT + j * P::S + q, q);
}
template <class P>
static void group_norm_forward(float epsilon, const float *x, const float *scale, const float *shift,
                               float *y, float *kept)
{
    float *mean = kept, *inverse = kept + P::S;
    memset(kept, 0, 2 * P::S * sizeof(float));
    pixels<P>([&](int at, int, int q) { st(mean + q, ld(mean + q) + ld(x + at)); });
    by_group<P>(mean);
    pixels<P>([&](int at, int, int q) {
        const v8 d = ld(x + at) - ld(mean + q);
        st(inverse + q, ld(inverse + q) + d * d);
    });
    by_group<P>(inverse);
    for (int c = 0; c < P::C; c++) inverse[c] = 1 / sqrtf(inverse[c] + epsilon);
    for (int c = P::C; c < P::S; c++) inverse[c] = 0;
    pixels<P>([&](int at, int to, int q) {
        st(y + to, (ld(x + at) - ld(mean + q)) * ld(inverse + q) * ld(scale + q) + ld(shift + q));
    });
}
template <class P>
static void group_norm_backward(const float *x, const float *scale, const float *kept, const float *dy,
                                float *dscale, float *dshift, float *dx)
{
    const float *mean = kept, *inverse = kept + P::S;
    float sum[P::S], product[P::S];
    memset(sum, 0, sizeof sum), memset(product, 0, sizeof product);
    pixels<P>([&](int at, int to, int q) {
        const v8 g = ld(dy + to), z = (ld(x + at) - ld(mean + q)) * ld(inverse + q);
        st(sum + q, ld(sum + q) + g), st(product + q, ld(product + q) + g * z);
    });
    for (int q = 0; q < P::S; q += 8) {
        st(dscale + q, ld(dscale + q) + ld(product + q)), st(dshift + q, ld(dshift + q) + ld(sum + q));
        st(sum + q, ld(sum + q) * ld(scale + q)), st(product + q, ld(product + q) * ld(scale + q));
    }
    if (!dx) return;
    by_group<P>(sum), by_group<P>(product);
    pixels<P>([&](int at, int to, int q) {
        const v8 z = (ld(x + at) - ld(mean + q)) * ld(inverse + q);
        st(dx + at, ld(inverse + q) * (ld(dy + to) * ld(scale + q) - ld(sum + q) - z * ld(product + q)));
    });
}

// Layer normalisation of n rows of `numbers`; `kept` [n][2] gets means and inverse deviations.
static void layer_norm_forward(long n, long numbers, float epsilon, const float *x, const float *scale,
                               const float *shift, float *y, float *kept)
{
    const long step = up(numbers);
    for (long m = 0; m < n; m++, x += step, y += step) {
        double sum = 0, squares = 0;
        for (long k = 0; k < numbers; k++) sum += x[k];
        const float mean = sum / numbers;
        for (long k = 0; k < numbers; k++) squares += (x[k] - mean) * (x[k] - mean);
        const float inverse = 1 / sqrt(squares / numbers + epsilon);
        for (long k = 0; k < numbers; k++) y[k] = (x[k] - mean) * inverse * scale[k] + shift[k];
        kept[2 * m] = mean, kept[2 * m + 1] = inverse;
    }
}
static void layer_norm_backward(long n, long numbers, const float *x, const float *scale, const float *kept,
                                const float *dy, float *dscale, float *dshift, float *dx)
{
    const long step = up(numbers);
    for (long m = 0; m < n; m++, x += step, dy += step) {
        const float mean = kept[2 * m], inverse = kept[2 * m + 1];
        double sum = 0, product = 0;
        for (long k = 0; k < numbers; k++) {
            const float z = (x[k] - mean) * inverse;
            dscale[k] += dy[k] * z, dshift[k] += dy[k];
            sum += dy[k] * scale[k], product += dy[k] * scale[k] * z;
        }
        const float s = sum / numbers, p = product / numbers;
        if (dx)
            for (long k = 0; k < numbers; k++)
                dx[m * step + k] = inverse * (dy[k] * scale[k] - s - (x[k] - mean) * inverse * p);
    }
}

// ------------------------------------------------------------------ losses: outputs to gradients

// exp(y - top) for every number of a row, their sum; NaN stays NaN.
INLINE float exponentials(long O, float *y)
{
    float top = y[0], sum = 0;
    for (long o = 1; o < O; o++) top = y[o] > top ? y[o] : top;
    long o = 0;
    for (; o + 8 <= O; o += 8) {
        const v8 e = exp8(ld(y + o) - bc(top));
        st(y + o, e), sum += total(e);
    }
    for (; o < O; o++) sum += y[o] = expf(y[o] - top);
    return sum;
}

enum Loss { CROSS_ENTROPY, SQUARED, BINARY };

// y [n][O, rounded up] becomes the gradient of the mean loss over the batch.
static void loss_backward(int loss, long n, long O, float *y, const int64_t *labels, const float *targets,
                          const int64_t *rows)
{
    const float whole = (float)n * O;
    for (long m = 0; m < n; m++, y += up(O)) {
        if (loss == CROSS_ENTROPY) {
            const float sum = exponentials(O, y);
            for (long o = 0; o < O; o++) y[o] /= sum * n;
            y[labels[rows[m]]] -= 1.0f / n;
            continue;
        }
        const float *t = targets + rows[m] * O;
        for (long o = 0; o < O; o++)
            y[o] = loss == SQUARED ? 2 * (y[o] - t[o]) / whole : (1 / (1 + expf(-y[o])) - t[o]) / whole;
    }
}

// y [length][n][O, rounded up] becomes the gradient of the mean cross-entropy over all places of the
// batch whose label is not 0 (padding); labels are [sample][length].
static void next_token_backward(long n, long length, long O, float *y, const int64_t *labels, const int64_t *rows)
{
    long count = 0;
    for (long m = 0; m < n; m++)
        for (long t = 0; t < length; t++) count += labels[rows[m] * length + t] != 0;
    for (long t = 0; t < length; t++)
        for (long m = 0; m < n; m++, y += up(O)) {
            const int64_t label = labels[rows[m] * length + t];
            if (!label) {
                memset(y, 0, 4 * O);
                continue;
            }
            const float sum = exponentials(O, y);
            for (long o = 0; o < O; o++) y[o] /= sum * count;
            y[label] -= 1.0f / count;
        }
}
