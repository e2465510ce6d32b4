// One layer of gated recurrent units over the vectors of tokens, a whole batch at a time.
//
// Rows of everything are [time][sample], so that a step in time is a contiguous block. What a token
// adds to the gates is multiplied out once for each of the few different tokens. The three gates
// (reset, update, new) take HP numbers each: units, rounded up to 8; padding is zero and stays so.
#pragma once
#include "dense.hpp"
#include "layers.hpp"

struct Recurrent {
    int64_t length, tokens, vector, units; // tokens per sample, different tokens, numbers per token, units
    int64_t embedding, input, hidden, input_bias, hidden_bias; // where parameters begin
    int64_t embedding_is, input_is, hidden_is, input_bias_is, hidden_bias_is;
};

struct RecurrentSpace {
    float *table;                        // [tokens][3 HP]: what a token adds to the gates
    float *reset, *update, *fresh, *old; // [length n][HP]: the gates; the hidden part of the new one
    float *states;                       // [(length + 1) n][HP], the first n are zero
    float *gates, *dtable, *dgates, *dinputs, *dh, *vectors;
    int32_t *tokens;                     // [length n]
};

static void *take(size_t numbers);

static void recurrent_space(const Recurrent &r, RecurrentSpace &s, long n)
{
    const long HP = up(r.units), rows = r.length * n;
    s.table = (float *)take(r.tokens * 3 * HP), s.dtable = (float *)take(r.tokens * 3 * HP);
    s.reset = (float *)take(rows * HP), s.update = (float *)take(rows * HP);
    s.fresh = (float *)take(rows * HP), s.old = (float *)take(rows * HP);
    s.states = (float *)take((rows + n) * HP), s.gates = (float *)take(n * 3 * HP);
    s.dgates = (float *)take(rows * 3 * HP), s.dinputs = (float *)take(n * 3 * HP);
    s.dh = (float *)take(n * HP), s.vectors = (float *)take(r.tokens * up(r.vector));
    s.tokens = (int32_t *)take(rows);
}
static void recurrent_free(RecurrentSpace &s)
{
    free(s.table), free(s.dtable), free(s.reset), free(s.update), free(s.fresh), free(s.old), free(s.states);
    free(s.gates), free(s.dgates), free(s.dinputs), free(s.dh), free(s.vectors), free(s.tokens);
}

INLINE v8 sigmoid8(v8 x) { return bc(1) / (bc(1) + exp8(-x)); }

// The states after every token: rows n, n + 1 ... of `states`.
static float *recurrent_forward(const Recurrent &r, RecurrentSpace &s, const float *w, const int32_t *tokens,
                                const int64_t *rows, long n)
{
    const long HP = up(r.units), G = 3 * HP, VP = up(r.vector);
    dense_forward(r.tokens, VP, G, false, w + r.embedding, w + r.input, w + r.input_bias, s.table);
    for (long m = 0; m < n; m++)
        for (long t = 0; t < r.length; t++) s.tokens[t * n + m] = tokens[(rows ? rows[m] : m) * r.length + t];
    memset(s.states, 0, 4 * n * HP);
    for (long t = 0; t < r.length; t++) {
        const float *before = s.states + t * n * HP;
        float *after = s.states + (t + 1) * n * HP;
        dense_forward(n, HP, G, false, before, w + r.hidden, w + r.hidden_bias, s.gates);
        for (long m = 0; m < n; m++) {
            const float *in = s.table + s.tokens[t * n + m] * G, *g = s.gates + m * G;
            const long at = (t * n + m) * HP;
            for (long k = 0; k < HP; k += 8) {
                const v8 reset = sigmoid8(ld(in + k) + ld(g + k));
                const v8 update = sigmoid8(ld(in + HP + k) + ld(g + HP + k));
                const v8 old = ld(g + 2 * HP + k), fresh = tanh8(ld(in + 2 * HP + k) + reset * old);
                st(s.reset + at + k, reset), st(s.update + at + k, update);
                st(s.old + at + k, old), st(s.fresh + at + k, fresh);
                st(after + m * HP + k, fresh + update * (ld(before + m * HP + k) - fresh));
            }
        }
    }
    return s.states + n * HP;
}

// dy [length n][HP] is the gradient of the states. Moves all parameters.
static void recurrent_backward(const Recurrent &r, RecurrentSpace &s, float *w, long n, const float *dy,
                               const Step *how, float *room)
{
    const long HP = up(r.units), G = 3 * HP, VP = up(r.vector), all = r.length * n;
    memset(s.dh, 0, 4 * n * HP), memset(s.dtable, 0, 4 * r.tokens * G);
    for (long t = r.length - 1; t >= 0; t--) {
        const float *before = s.states + t * n * HP;
        float *dgates = s.dgates + t * n * G;
        for (long m = 0; m < n; m++) {
            const long at = (t * n + m) * HP;
            float *into = s.dtable + s.tokens[t * n + m] * G, *dg = dgates + m * G, *dh = s.dh + m * HP;
            for (long k = 0; k < HP; k += 8) {
                const v8 d = ld(dh + k) + ld(dy + at + k), update = ld(s.update + at + k);
                const v8 fresh = ld(s.fresh + at + k), reset = ld(s.reset + at + k);
                const v8 dfresh = d * (bc(1) - update) * (bc(1) - fresh * fresh);
                const v8 dupdate = d * (ld(before + m * HP + k) - fresh) * update * (bc(1) - update);
                const v8 dreset = dfresh * ld(s.old + at + k) * reset * (bc(1) - reset);
                st(dg + k, dreset), st(dg + HP + k, dupdate), st(dg + 2 * HP + k, dfresh * reset);
                st(into + k, ld(into + k) + dreset), st(into + HP + k, ld(into + HP + k) + dupdate);
                st(into + 2 * HP + k, ld(into + 2 * HP + k) + dfresh);
                st(dh + k, d * update); // and what comes by way of the gates
            }
        }
        if (t == 0) break;
        float *by_gates = s.dinputs;
        dense_data_backward(n, HP, G, dgates, w + r.hidden, by_gates);
        for (long k = 0; k < n * HP; k += 8) st(s.dh + k, ld(s.dh + k) + ld(by_gates + k));
    }
    const bool words = r.embedding_is >= 0;
    if (words) {
        dense_data_backward(r.tokens, VP, G, s.dtable, w + r.input, s.vectors);
        memset(s.vectors, 0, 4 * VP); // padding is not trained
    }
    if (r.hidden_is >= 0) dense_step(all, HP, G, s.states, s.dgates, how[r.hidden_is], w + r.hidden, room + r.hidden);
    if (r.hidden_bias_is >= 0) bias_step(all, G, s.dgates, how[r.hidden_bias_is], w + r.hidden_bias);
    if (r.input_is >= 0) dense_step(r.tokens, VP, G, w + r.embedding, s.dtable, how[r.input_is], w + r.input, room + r.input);
    if (r.input_bias_is >= 0) bias_step(r.tokens, G, s.dtable, how[r.input_bias_is], w + r.input_bias);
    if (words) move_all(how[r.embedding_is], r.tokens * VP, s.vectors, w + r.embedding);
}
