// Filters over words, each maximised over time (TextCNN), a whole batch at a time.
//
// Each different word of the batch meets each filter once: a *table* says what word u at place j of a
// window adds to filter f. A window is the sum of `width` entries. Only the window that wins has a
// gradient, so going back means adding one number times a word's vector to a filter's weights, and
// times these weights to the word's gradient, `width` times for each text and filter.
//
// Word 0 is padding: its vector is zero and stays so. It stands at the end of texts only.
#pragma once
#include "dense.hpp"
#include "layers.hpp"

enum { KINDS = 8 }; // of filters

struct Words {
    int64_t length, known, most;       // tokens per text; different words that the client has (at most), with padding
    int64_t vector;                    // numbers per word, rounded up
    int64_t kinds, filters[KINDS], width[KINDS];
    int64_t weight[KINDS], bias[KINDS]; // weights are [width][filters][vector]
    int64_t weight_is[KINDS], bias_is[KINDS];
    int64_t embedding, embedding_is;   // the vectors of the words: [known][vector]
    int64_t rest, features;            // where the number is that stands for all other words; outputs
};

struct WordSpace {
    int32_t *tokens;  // [n][length], in numbers of the batch
    int32_t *number;  // [known]: of a word in the batch, -1: none
    int32_t *which;   // [unique]: the word
    int32_t *winner;  // [n][features]: where the best window begins; -1: in the padding
    int32_t *ends;    // [n]: words in a text
    float *vectors, *gradients, *table, *grad, *none;
    float *g;           // [n]: gradients of one filter,
    const float **from; // and what they are for
    long unique;
};

static void *take(size_t numbers);

static void words_space(const Words &t, WordSpace &s, long n)
{
    const long most = n * t.length + 1, unique = most < t.most ? most : t.most;
    long entries = 0;
    for (long c = 0; c < t.kinds; c++) {
        const long here = up(t.filters[c]) * t.width[c];
        entries = here > entries ? here : entries;
    }
    s.tokens = (int32_t *)take(n * t.length), s.number = (int32_t *)take(t.most);
    s.which = (int32_t *)take(unique), s.ends = (int32_t *)take(n);
    s.winner = (int32_t *)take(n * up(t.features)), s.none = (float *)take(entries);
    s.vectors = (float *)take(unique * t.vector), s.gradients = (float *)take(unique * t.vector);
    s.table = (float *)take(unique * entries), s.grad = (float *)take(entries * t.vector);
    s.g = (float *)take(n), s.from = (const float **)take(2 * n);
    for (long k = 0; k < t.most; k++) s.number[k] = -1;
    s.unique = 0;
}
static void words_free(WordSpace &s)
{
    free(s.tokens), free(s.number), free(s.which), free(s.ends), free(s.winner), free(s.none);
    free(s.vectors), free(s.gradients), free(s.table), free(s.grad), free(s.g), free(s.from);
}

// The numbers that the batch's words have in it, and their vectors side by side.
static void find_words(const Words &t, WordSpace &s, const float *w, const int32_t *tokens, const int64_t *rows, long n)
{
    s.unique = 1, s.number[0] = 0, s.which[0] = 0;
    for (long m = 0; m < n; m++) {
        const int32_t *from = tokens + (rows ? rows[m] : m) * t.length;
        int32_t *to = s.tokens + m * t.length;
        s.ends[m] = 0;
        for (long k = 0; k < t.length; k++) {
            const int32_t word = from[k];
            if (s.number[word] < 0) s.number[word] = s.unique, s.which[s.unique++] = word;
            to[k] = s.number[word];
            if (word) s.ends[m] = k + 1;
        }
    }
    for (long u = 0; u < s.unique; u++)
        memcpy(s.vectors + u * t.vector, w + t.embedding + s.which[u] * t.vector, 4 * t.vector);
}
static void forget_words(WordSpace &s)
{
    for (long u = 0; u < s.unique; u++) s.number[s.which[u]] = -1;
}

// The best windows of one text for 8 V filters; `winner` says where they begin.
template <int V>
TILE void best_windows(long windows, long width, long step, long stride, const int32_t *tokens, const float *table,
                       bool padding, float *out, int32_t *winner)
{
    v8 best[V];
    i8 where[V];
    EACH(q, V) best[q] = bc(padding ? 0 : -INFINITY), where[q] = bi(-1);
    for (long p = 0; p < windows; p++) {
        v8 sum[V];
        const float *first = table + tokens[p] * stride;
        EACH(q, V) sum[q] = ld(first + 8 * q);
        for (long j = 1; j < width; j++) {
            const float *next = table + tokens[p + j] * stride + j * step;
            EACH(q, V) sum[q] += ld(next + 8 * q);
        }
        EACH(q, V) {
            const i8 wins = (sum[q] > best[q]) | (sum[q] != sum[q]);
            best[q] = pick(wins, sum[q], best[q]), where[q] = picki(wins, bi((int32_t)p), where[q]);
        }
    }
    EACH(q, V) st(out + 8 * q, best[q]), *(i8u *)(winner + 8 * q) = where[q];
}

// y [n][features, rounded up] = relu(maxima + bias).
static void words_forward(const Words &t, WordSpace &s, const float *w, long n, float *y)
{
    const long FP = up(t.features);
    long feature = 0;
    for (long c = 0; c < t.kinds; c++) {
        const long step = up(t.filters[c]), entries = step * t.width[c];
        dense_forward(s.unique, t.vector, entries, false, s.vectors, w + t.weight[c], s.none, s.table);
        for (long m = 0; m < n; m++) {
            const int32_t *tokens = s.tokens + m * t.length;
            const long all_windows = t.length - t.width[c] + 1;
            const bool padding = all_windows > s.ends[m]; // a window of nothing else
            const long windows = padding ? s.ends[m] : all_windows;
            float best[up(1024)];
            int32_t winner[up(1024)];
            long f = 0;
            for (; f + 32 <= step; f += 32)
                best_windows<4>(windows, t.width[c], step, entries, tokens, s.table + f, padding, best + f, winner + f);
            for (; f < step; f += 8)
                best_windows<1>(windows, t.width[c], step, entries, tokens, s.table + f, padding, best + f, winner + f);
            for (f = 0; f < t.filters[c]; f++) {
                const float value = best[f] + w[t.bias[c] + f];
                y[m * FP + feature + f] = value < 0 ? 0 : value; // NaN stays NaN
                s.winner[m * FP + feature + f] = winner[f];
            }
        }
        feature += t.filters[c];
    }
}

// d [V vectors] += sum over n of g * v.
template <int V> TILE void combine(long n, const float *g, const float *const *v, float *d)
{
    v8 acc[V];
    EACH(q, V) acc[q] = ldm<8>(d + 8 * q);
    for (long k = 0; k < n; k++) {
        const v8 f = bcm<8>(g + k);
        const float *p = v[k];
        EACH(q, V) acc[q] = fmam<8>(acc[q], f, p + 8 * q);
    }
    EACH(q, V) st(d + 8 * q, acc[q]);
}

// dy is the gradient of what came out, y. Moves filters, biases and words.
static void words_backward(const Words &t, WordSpace &s, float *w, long n, const float *y, float *dy, const Step *how)
{
    const long FP = up(t.features), VP = t.vector;
    mask_gradient(n * FP, y, dy);
    const bool words = t.embedding_is >= 0;
    if (words) memset(s.gradients, 0, 4 * s.unique * VP);
    long feature = 0;
    for (long c = 0; c < t.kinds; c++) {
        const long step = up(t.filters[c]), size = step * t.width[c] * VP;
        float *weights = w + t.weight[c];
        memset(s.grad, 0, 4 * size);
        for (long f = 0; f < t.filters[c]; f++)
            for (long j = 0; j < t.width[c]; j++) {
                float *g = s.g;
                const float **from = s.from, *filter = weights + (j * step + f) * VP;
                long count = 0;
                for (long m = 0; m < n; m++) {
                    const int32_t p = s.winner[m * FP + feature + f];
                    const float gradient = dy[m * FP + feature + f];
                    if (gradient == 0 || p < 0) continue;
                    const long u = s.tokens[m * t.length + p + j];
                    if (!u) continue; // padding
                    g[count] = gradient, from[count++] = s.vectors + u * VP;
                    if (words) {
                        float *d = s.gradients + u * VP;
                        const v8 times = bc(gradient);
                        for (long k = 0; k < VP; k += 8) st(d + k, ld(d + k) + times * ld(filter + k));
                    }
                }
                float *d = s.grad + (j * step + f) * VP;
                long k = 0;
                for (; k + 96 <= VP; k += 96) {
                    combine<12>(count, g, from, d + k);
                    for (long i = 0; i < count; i++) from[i] += 96;
                }
                for (; k < VP; k += 8) {
                    combine<1>(count, g, from, d + k);
                    for (long i = 0; i < count; i++) from[i] += 8;
                }
            }
        float sums[up(1024)];
        memset(sums, 0, sizeof sums);
        for (long m = 0; m < n; m++)
            for (long f = 0; f < t.filters[c]; f++) sums[f] += dy[m * FP + feature + f];
        if (t.weight_is[c] >= 0) move_all(how[t.weight_is[c]], size, s.grad, weights);
        if (t.bias_is[c] >= 0) move_all(how[t.bias_is[c]], step, sums, w + t.bias[c]);
        feature += t.filters[c];
    }
    if (!words) return;
    const Step &h = how[t.embedding_is];
    for (long word = 0; word < t.known; word++) {
        const long u = s.number[word];
        float *v = w + t.embedding + word * VP;
        for (long k = 0; k < VP; k += 8) move(h, u > 0 ? ld(s.gradients + u * VP + k) : bc(0), v + k);
    }
    move(h, bc(0), w + t.rest);
}
