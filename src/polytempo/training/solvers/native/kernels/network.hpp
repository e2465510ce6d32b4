// The training loop. What is included before it says what each sample goes through by itself (its
// *front*: convolutions and the like), or defines NO_FRONT.
#pragma once
#include "dense.hpp"
#include "layers.hpp"
#include "recurrent.hpp"
#include "words.hpp"

enum Kind { DENSE, ACTIVATION, DROPOUT, LAYER_NORM };
enum { MOST = 64, FROZEN = -1, SHARED = 0, OWN = 1 }; // layers; whose a parameter is

// A layer that whole batches go through.
struct Layer {
    int64_t kind, option;    // option: whether ReLU follows a dense layer; which activation
    int64_t inputs, outputs; // numbers per sample: as stored, without padding
    int64_t weight, bias;    // where they begin
    int64_t weight_is, bias_is; // frozen, shared, own
    int64_t wanted;          // whether anything before it is trained
    double number;
};
struct Net {
    int64_t size, inputs, outputs, layers, criterion; // inputs: numbers per sample, as stored
    Layer layer[MOST];
    Words words;         // what texts go through first, if it has `kinds`
    Recurrent recurrent; // what sequences go through first, if it has `units`
    Runs shared;
};
// What is to be done. Batch k has the samples rows[ends[k - 1]..ends[k]].
struct Run {
    const void *x; // numbers, or tokens
    const int64_t *labels;
    const float *targets;
    const int64_t *rows, *ends;
    const double *rates;
    const float *noise; // for dropout: of one step
    const float *offset; // what is added to the outputs, if anything
    int64_t steps, taken;
    int64_t optimiser, objective, masked;
    double momentum, decay, beta2, epsilon, strength;
};

static void *take(size_t numbers)
{
    void *p;
    if (posix_memalign(&p, 64, 4 * numbers + 512)) abort();
    return memset(p, 0, 4 * numbers + 512); // with room for vectors that begin at the last number
}

#ifdef NO_FRONT
struct Front {};
enum { FEATURES = 0, SAMPLE = 0, FRONT_NOISE = 0 };
static void front_space(Front &, long, float *) {}
static void front_free(Front &) {}
static void front_begin(Front &, const float *) {}
static void front_begin_gradient(Front &) {}
static void front_forward(Front &, const float *, const float *, long, long, const float *) {}
static void front_backward(Front &, const float *, const float *, long, long, const float *) {}
static void front_step(Front &, float *, const Step *) {}
static float *front_out(Front &) { return 0; }
static float *front_gradient(Front &) { return 0; }
#endif

struct Space {
    long room;
    Front front;
    WordSpace words;
    RecurrentSpace recurrent;
    float *x, *dx, *grad, *y[MOST], *d[MOST], *kept[MOST]; // what the layers begin with, and get
};

// Rows of a batch of n samples: of a sequence, each token is one.
static long rows_of(const Net *net, long n) { return net->recurrent.units ? n * net->recurrent.length : n; }

// Layers from number `first` on; with 0, the samples are brought in before.
static void forward(Space *s, const Net *net, const float *w, const void *samples, const int64_t *rows, long n,
                    const float *noise, long first = 0)
{
    const float *x = (const float *)samples, *in = first ? s->y[first - 1] : s->x;
    if (first) {
    } else if (net->words.kinds) {
        find_words(net->words, s->words, w, (const int32_t *)samples, rows, n);
        words_forward(net->words, s->words, w, n, s->x);
    } else if (net->recurrent.units) {
        in = s->x = recurrent_forward(net->recurrent, s->recurrent, w, (const int32_t *)samples, rows, n);
    } else if (FEATURES) {
        for (long k = 0; k < n; k++)
            front_forward(s->front, w, x + (rows ? rows[k] : k) * SAMPLE, k, n, noise);
        in = front_out(s->front);
        noise += noise ? n * FRONT_NOISE : 0;
    } else
        for (long k = 0; k < n; k++)
            memcpy(s->x + k * net->inputs, x + (rows ? rows[k] : k) * net->inputs, 4 * net->inputs);
    n = rows_of(net, n);
    for (long k = first; k < net->layers; in = s->y[k++]) {
        const Layer &l = net->layer[k];
        if (l.kind == DENSE)
            dense_forward(n, l.inputs, l.outputs, l.option, in, w + l.weight, w + l.bias, s->y[k]);
        if (l.kind == ACTIVATION) activate(l.option, n * l.inputs, in, s->y[k]);
        if (l.kind == LAYER_NORM)
            layer_norm_forward(n, l.outputs, l.number, in, w + l.weight, w + l.bias, s->y[k], s->kept[k]);
        if (l.kind == DROPOUT) {
            drop(n, l.outputs, l.inputs, noise, in, s->y[k]);
            noise += noise ? n * l.outputs : 0;
        }
    }
}

static void backward(Space *s, const Net *net, float *w, const void *x, const int64_t *rows, long n,
                     const float *noise, const Step *how, long first = 0)
{
    const long samples = n;
    n = rows_of(net, n);
    const float *past = noise; // the noise of the layer at hand ends here
    if (noise) {
        past += n * FRONT_NOISE;
        for (long k = 0; k < net->layers; k++)
            if (net->layer[k].kind == DROPOUT) past += n * net->layer[k].outputs;
    }
    for (long k = net->layers - 1; k >= first; k--) {
        const Layer &l = net->layer[k];
        const float *in = k ? s->y[k - 1] : FEATURES ? front_out(s->front) : s->x;
        float *dx = !l.wanted ? 0 : k ? s->d[k - 1] : FEATURES ? front_gradient(s->front) : s->dx, *dy = s->d[k];
        if (l.kind == DENSE) {
            if (l.option) mask_gradient(n * up(l.outputs), s->y[k], dy);
            if (dx) dense_data_backward(n, l.inputs, l.outputs, dy, w + l.weight, dx);
            if (l.weight_is >= 0) dense_step(n, l.inputs, l.outputs, in, dy, how[l.weight_is], w + l.weight, s->grad + l.weight);
            if (l.bias_is >= 0) bias_step(n, l.outputs, dy, how[l.bias_is], w + l.bias);
        }
        if (l.kind == ACTIVATION && dx) activate_backward(l.option, n * l.inputs, in, dy, dx);
        if (l.kind == DROPOUT) {
            past -= noise ? n * l.outputs : 0;
            if (dx) drop(n, l.outputs, l.inputs, noise ? past : 0, dy, dx);
        }
        if (l.kind == LAYER_NORM) {
            float *scale = s->grad + l.weight, *shift = s->grad + l.bias;
            memset(scale, 0, 4 * up(l.outputs)), memset(shift, 0, 4 * up(l.outputs));
            layer_norm_backward(n, l.outputs, in, w + l.weight, s->kept[k], dy, scale, shift, dx);
            if (l.weight_is >= 0) move_all(how[l.weight_is], up(l.outputs), scale, w + l.weight);
            if (l.bias_is >= 0) move_all(how[l.bias_is], up(l.outputs), shift, w + l.bias);
        }
        if (!l.wanted) return;
    }
    if (first) return;
    n = samples;
    if (net->recurrent.units) recurrent_backward(net->recurrent, s->recurrent, w, n, s->dx, how, s->grad);
    if (net->words.kinds) words_backward(net->words, s->words, w, n, s->x, s->dx, how);
    if (FEATURES) {
        front_begin_gradient(s->front);
        for (long k = 0; k < n; k++) front_backward(s->front, w, (const float *)x + rows[k] * SAMPLE, k, n, noise);
        front_step(s->front, w, how);
    }
}

// Step k of the run, without its objective; and what it is for parameters of the client's own.
static Step step_of(const Net *net, const Run *run, long k)
{
    Step h = {};
    const long t = run->taken + k + 1;
    h.optimiser = run->optimiser, h.masked = run->masked, h.lr = run->rates[k], h.momentum = run->momentum;
    h.decay = run->decay, h.beta2 = run->beta2, h.rest2 = 1 - run->beta2, h.epsilon = run->epsilon;
    if (run->optimiser == ADAM || run->optimiser == ADAMW)
        h.first = 1 - pow(1 - run->momentum, t), h.second = 1 - pow(run->beta2, t);
    h.moment = net->size, h.anchor = 2 * net->size, h.moment2 = 3 * net->size, h.mask = 4 * net->size;
    return h;
}
static Step own(Step h)
{
    h.pulled = false;
    return h;
}

static void loss(Space *s, const Net *net, const Run *run, const int64_t *rows, long n)
{
    const long last = net->layers - 1, length = net->recurrent.length;
    memcpy(s->d[last], s->y[last], 4 * rows_of(net, n) * up(net->outputs));
    if (net->recurrent.units) {
        next_token_backward(n, length, net->outputs, s->d[last], run->labels, rows);
        return;
    }
    if (run->offset)
        for (long m = 0; m < n; m++)
            for (long o = 0; o < net->outputs; o++) s->d[last][m * up(net->outputs) + o] += run->offset[o];
    loss_backward(net->criterion, n, net->outputs, s->d[last], run->labels, run->targets, rows);
}

extern "C" {
// Buffers for batches of that many samples.
Space *space(const Net *net, long room)
{
    Space *s = (Space *)calloc(1, sizeof *s);
    s->room = room, s->grad = (float *)take(net->size);
    if (FEATURES) front_space(s->front, room, s->grad);
    const long inputs = net->layer[0].inputs, rows = rows_of(net, room);
    if (net->recurrent.units)
        recurrent_space(net->recurrent, s->recurrent, room);
    else if (!FEATURES)
        s->x = (float *)take(room * inputs);
    if (net->words.kinds) words_space(net->words, s->words, room);
    if (net->words.kinds || net->recurrent.units) s->dx = (float *)take(rows * inputs);
    for (long k = 0; k < net->layers; k++) {
        const long numbers = rows * up(net->layer[k].outputs);
        s->y[k] = (float *)take(numbers), s->d[k] = (float *)take(numbers);
        s->kept[k] = (float *)take(2 * rows);
    }
    return s;
}

void release(const Net *net, Space *s)
{
    for (long k = 0; k < net->layers; k++) free(s->y[k]), free(s->d[k]), free(s->kept[k]);
    front_free(s->front);
    words_free(s->words), recurrent_free(s->recurrent);
    if (!net->recurrent.units) free(s->x); // else it is one of the recurrent layer's
    free(s->dx), free(s->grad), free(s);
}

// w is [5][size]: the model, its first moment, the anchor, the second moment, the mask.
void train(Space *s, const Net *net, float *w, const Run *run)
{
    for (long k = 0, begin = 0; k < run->steps; begin = run->ends[k++]) {
        const int64_t *rows = run->rows + begin;
        const long n = run->ends[k] - begin;
        Step how[2] = {step_of(net, run, k)};
        pull(run->objective, run->strength, net->shared, w, how[SHARED]);
        how[OWN] = own(how[SHARED]);
        front_begin(s->front, w);
        forward(s, net, w, run->x, rows, n, run->noise);
        loss(s, net, run, rows, n);
        backward(s, net, w, run->x, rows, n, run->noise, how);
        forget_words(s->words);
    }
}

// The products of n samples with each other, [n][n, rounded up].
void gram(long n, long numbers, const float *x, float *to)
{
    float *none = (float *)take(up(n));
    float *padded = (float *)take(up(n, 4) * numbers); // rows of weights come in fours
    memcpy(padded, x, 4 * n * numbers);
    dense_forward(n, numbers, n, false, x, padded, none, to);
    free(none), free(padded);
}

// The same as `train`, with the first layer in *dual* form: for few samples X of many features. All
// gradients of the layer are combinations of the samples, and weight decay or a pull towards the
// received W0 only scale, so that at any time W = alpha W0 + C' X. We train C and alpha, and the
// activations of all samples Z = X W' with them: Z begins as Z0 = X W0' and is moved as if it were
// weights too, by X X' times the gradient of C, which is the error itself in the rows of the batch.
// `room` is [5][samples][outputs, rounded up].
void train_dual(Space *s, const Net *net, float *w, const Run *run, long samples, const float *gram, float *room)
{
    const Layer &l = net->layer[0];
    const long O = l.outputs, OP = up(O), IP = l.inputs, GP = up(samples), block = samples * OP;
    float *C = room, *Z = room + 2 * block, *Z0 = room + 4 * block, *W = w + l.weight, *none = (float *)take(OP);
    float *sums = (float *)take(O * IP), *products_of = (float *)take((s->room + 1) * GP);
    int64_t *number = (int64_t *)take(2 * samples); // in the batch, from 1
    memset(room, 0, 4 * 2 * block);
    const float *x = (const float *)run->x;
    dense_forward(samples, IP, O, false, x, W, none, Z0);
    memcpy(Z, Z0, 4 * block), memset(Z + block, 0, 4 * block);
    const bool shared = l.weight_is == SHARED;
    const Runs others = {net->shared.count - shared, net->shared.from + shared, net->shared.to + shared};
    const double whole = shared ? dot(O * IP, W, W) : 0;
    double alpha = 1, speed = 0;
    for (long k = 0, begin = 0; k < run->steps; begin = run->ends[k++]) {
        const int64_t *rows = run->rows + begin;
        const long n = run->ends[k] - begin;
        Step how[2] = {step_of(net, run, k)};
        Products p = {};
        if (run->objective == COSINE || run->objective == INNER) {
            p = products(others, w, w + 2 * net->size);
            if (shared) {
                const double across = dot(block, C, Z0);
                p.ww += alpha * alpha * whole + alpha * across + dot(block, C, Z);
                p.wa += alpha * whole + across, p.aa += whole;
            }
        }
        pull_by(run->objective, run->strength, p, how[SHARED]);
        how[OWN] = own(how[SHARED]);
        float *y = s->y[0], *e = s->d[0];
        for (long m = 0; m < n; m++)
            for (long o = 0; o < OP; o += 8) {
                const v8 z = ld(Z + rows[m] * OP + o) + ld(w + l.bias + o);
                st(y + m * OP + o, l.option ? relu8(z) : z);
            }
        forward(s, net, w, 0, 0, n, 0, 1);
        loss(s, net, run, rows, n);
        backward(s, net, w, 0, 0, n, 0, how, 1);
        if (l.option) mask_gradient(n * OP, y, e);
        if (l.bias_is >= 0) bias_step(n, O, e, how[l.bias_is], w + l.bias);
        Step h = how[l.weight_is];
        const double u = h.pulled ? h.u + h.away : 0, v = h.pulled ? h.v - h.away : 0;
        speed = h.momentum * speed + (h.decay + u) * alpha + v, alpha -= h.lr * speed;
        h.moment = block, h.anchor = 2 * block; // Z, then its momentum, then Z0
        for (long m = 0; m < n; m++) memcpy(products_of + m * GP, gram + rows[m] * GP, 4 * GP);
        outer<MOVED>(samples, OP, n, 1, GP, OP, OP, products_of, e, Z, &h);
        for (long m = 0; m < n; m++) {
            int64_t &at = number[rows[m]];
            if (at) // a sample that is in the batch twice
                for (long o = 0; o < OP; o += 8) st(e + (at - 1) * OP + o, ld(e + (at - 1) * OP + o) + ld(e + m * OP + o));
            else
                at = m + 1;
        }
        h.pulled = false, h.decay += u; // C has no anchor
        for (long m = 0; m < samples; m++) {
            for (long o = 0; o < OP; o += 8)
                move(h, number[m] ? ld(e + (number[m] - 1) * OP + o) : bc(0), C + m * OP + o);
            number[m] = 0;
        }
    }
    for (long k = 0; k < samples; k += 256) // few enough at a time to stay in a cache
        outer<ADDED>(O, IP, samples - k < 256 ? samples - k : 256, 1, OP, IP, IP, C + k * OP, x + k * IP, sums, 0);
    for (long k = 0; k < O * IP; k += 8) st(W + k, bc(alpha) * ld(W + k) + ld(sums + k));
    free(none), free(sums), free(products_of), free(number);
}

// What the model makes of n samples, [n][outputs].
void infer(Space *s, const Net *net, const float *w, const float *x, long n, float *out)
{
    const long sample = net->inputs; // tokens are as long as numbers
    front_begin(s->front, w);
    for (long begin = 0; begin < n; begin += s->room) {
        const long count = n - begin < s->room ? n - begin : s->room;
        forward(s, net, w, x + begin * sample, 0, count, 0);
        forget_words(s->words);
        const long length = rows_of(net, 1); // rows are [time][sample]
        for (long k = 0; k < count; k++)
            for (long t = 0; t < length; t++, out += net->outputs)
                memcpy(out, s->y[net->layers - 1] + (t * count + k) * up(net->outputs), 4 * net->outputs);
    }
}

// Between the order of torch's parameters and ours.
void spread(long n, const int32_t *place, const float *from, float *to)
{
    for (long k = 0; k < n; k++) to[place[k]] = from[k];
}
void gather(long n, const int32_t *place, const float *from, float *to)
{
    for (long k = 0; k < n; k++) to[k] = from[place[k]];
}
}
