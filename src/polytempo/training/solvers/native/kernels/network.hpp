// The training loop. What is included before it says what each sample goes through by itself (its
// *front*: convolutions and the like), or defines NO_FRONT.
#pragma once
#include "dense.hpp"
#include "layers.hpp"

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
    int64_t size, inputs, outputs, layers, loss, front_trained;
    Layer layer[MOST];
    Runs shared;
};
// What is to be done. Batch k has the samples rows[ends[k - 1]..ends[k]].
struct Run {
    const float *x;
    const int64_t *labels;
    const float *targets;
    const int64_t *rows, *ends;
    const double *rates;
    const float *noise; // for dropout: of one step
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
    float *x, *grad, *y[MOST], *d[MOST], *kept[MOST];
};

static void forward(Space *s, const Net *net, const float *w, const float *x, const int64_t *rows, long n,
                    const float *noise)
{
    const float *in = s->x;
    if (FEATURES) {
        for (long k = 0; k < n; k++)
            front_forward(s->front, w, x + (rows ? rows[k] : k) * SAMPLE, k, n, noise);
        in = front_out(s->front);
        noise += noise ? n * FRONT_NOISE : 0;
    } else
        for (long k = 0; k < n; k++)
            memcpy(s->x + k * net->inputs, x + (rows ? rows[k] : k) * net->inputs, 4 * net->inputs);
    for (long k = 0; k < net->layers; in = s->y[k++]) {
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

static void backward(Space *s, const Net *net, float *w, const float *x, const int64_t *rows, long n,
                     const float *noise, const Step *how)
{
    const float *past = noise; // the noise of the layer at hand ends here
    if (noise) {
        past += n * FRONT_NOISE;
        for (long k = 0; k < net->layers; k++)
            if (net->layer[k].kind == DROPOUT) past += n * net->layer[k].outputs;
    }
    for (long k = net->layers - 1; k >= 0; k--) {
        const Layer &l = net->layer[k];
        const float *in = k ? s->y[k - 1] : FEATURES ? front_out(s->front) : s->x;
        float *dx = !l.wanted ? 0 : k ? s->d[k - 1] : front_gradient(s->front), *dy = s->d[k];
        if (l.kind == DENSE) {
            if (l.option) mask_gradient(n * up(l.outputs), s->y[k], dy);
            if (dx) dense_data_backward(n, l.inputs, l.outputs, dy, w + l.weight, dx);
            if (l.weight_is >= 0) dense_step(n, l.inputs, l.outputs, in, dy, how[l.weight_is], w + l.weight);
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
    if (FEATURES && net->front_trained) {
        front_begin_gradient(s->front);
        for (long k = 0; k < n; k++) front_backward(s->front, w, x + rows[k] * SAMPLE, k, n, noise);
        front_step(s->front, w, how);
    }
}

extern "C" {
// Buffers for batches of that many samples.
Space *space(const Net *net, long room)
{
    Space *s = (Space *)calloc(1, sizeof *s);
    s->room = room, s->grad = (float *)take(net->size);
    if (FEATURES)
        front_space(s->front, room, s->grad);
    else
        s->x = (float *)take(room * net->inputs);
    for (long k = 0; k < net->layers; k++) {
        const long numbers = room * up(net->layer[k].outputs);
        s->y[k] = (float *)take(numbers), s->d[k] = (float *)take(numbers);
        s->kept[k] = (float *)take(2 * room);
    }
    return s;
}

void release(const Net *net, Space *s)
{
    for (long k = 0; k < net->layers; k++) free(s->y[k]), free(s->d[k]), free(s->kept[k]);
    front_free(s->front);
    free(s->x), free(s->grad), free(s);
}

// w is [5][size]: the model, its first moment, the anchor, the second moment, the mask.
void train(Space *s, const Net *net, float *w, const Run *run)
{
    Step how[2];
    memset(how, 0, sizeof how);
    Step &h = how[SHARED];
    h.optimiser = run->optimiser, h.masked = run->masked, h.momentum = run->momentum;
    h.decay = run->decay, h.beta2 = run->beta2, h.rest2 = 1 - run->beta2, h.epsilon = run->epsilon;
    h.moment = net->size, h.anchor = 2 * net->size, h.moment2 = 3 * net->size, h.mask = 4 * net->size;
    for (long k = 0, begin = 0; k < run->steps; begin = run->ends[k++]) {
        const int64_t *rows = run->rows + begin;
        const long n = run->ends[k] - begin, t = run->taken + k + 1, last = net->layers - 1;
        h.lr = run->rates[k];
        if (run->optimiser == ADAM || run->optimiser == ADAMW)
            h.first = 1 - pow(1 - run->momentum, t), h.second = 1 - pow(run->beta2, t);
        pull(run->objective, run->strength, net->shared, w, h);
        how[OWN] = h, how[OWN].pulled = how[OWN].masked = false;
        front_begin(s->front, w);
        forward(s, net, w, run->x, rows, n, run->noise);
        memcpy(s->d[last], s->y[last], 4 * n * up(net->outputs));
        loss_backward(net->loss, n, net->outputs, s->d[last], run->labels, run->targets, rows);
        backward(s, net, w, run->x, rows, n, run->noise, how);
    }
}

// What the model makes of n samples, [n][outputs].
void infer(Space *s, const Net *net, const float *w, const float *x, long n, float *out)
{
    const long sample = FEATURES ? SAMPLE : net->inputs;
    front_begin(s->front, w);
    for (long begin = 0; begin < n; begin += s->room) {
        const long count = n - begin < s->room ? n - begin : s->room;
        forward(s, net, w, x + begin * sample, 0, count, 0);
        for (long k = 0; k < count; k++, out += net->outputs)
            memcpy(out, s->y[net->layers - 1] + k * up(net->outputs), 4 * net->outputs);
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
