// Convolutions and pooling, one sample at a time: its activations stay in the nearest cache.
//
// Samples are [height][width][pixel]. A pixel takes S numbers: its channels, rounded up to a multiple
// of 8 for inner layers (the padding is zero and stays zero). What a filter sees of one input row is
// then one contiguous run of KW * S numbers, and the weights of a filter are [KH][run, rounded up
// to 8]. A convolution's own zero padding is a border around its input.
//
// After 2x2 max-pooling, one of four outputs has a gradient; after ReLU, about half of those. Backward
// therefore goes over lists of (place of the window in the input, gradient) for each filter: for the
// weights, the window is added to sums in registers; for the input, the filter is added to the window.
//
// All sizes are constants of a geometry G:
//   C, S, ROW          channels, numbers per pixel, and per row, of the input
//   KH, KW, SH, SW     kernel and stride
//   O, OH, OW, OUT     filters; height and width of what comes out (after pooling); numbers per row
#pragma once
#include "step.hpp"

template <class G> struct Sizes {
    enum {
        OP = up(G::O),
        L = OP % WIDEST ? 8 : WIDEST, // numbers of a vector of channels,
        V = OP % (2 * L) ? 1 : 2,     // vectors of a tile,
        LV = L * V,                   // channels of a tile
        R = up(G::KW * G::S),         // numbers of a row of a filter,
        N = G::KH * R,                // of a filter
        TURNED = G::KH * G::KW * G::C * OP,
        WEIGHTS = G::O * N,
        PIECES = (R + WIDEST - 1) / WIDEST, // vectors of a row of a filter: wide ones, and perhaps one of 8
    };
};
constexpr int even(int n, int most) // the size of tiles that are as equal as can be
{
    int tiles = (n + most - 1) / most;
    return (n + tiles - 1) / tiles;
}

// ------------------------------------------------------------------ forward

// M neighbouring outputs of one row, V vectors of output channels; w is [KH][KW][C][LV].
template <class G, int M> TILE void conv_tile(const float *x, const float *w, const float *bias, float *out)
{
    constexpr int L = Sizes<G>::L, V = Sizes<G>::V, OP = Sizes<G>::OP, C = G::C, S = G::S;
    Vector<L> acc[M * V];
    EACH(r, M) EACH(q, V) acc[r * V + q] = ldm<L>(bias + L * q);
    constexpr int PIECE = S == C ? G::KW * C : C; // numbers of x that follow one another
    for (int kh = 0; kh < G::KH; kh++, x += G::ROW - G::KW * S)
        for (int piece = 0; piece < G::KW * C / PIECE; piece++, x += S == C ? 0 : S - C)
            for (int c = 0; c < PIECE; c++, x++, w += L * V) {
                Vector<L> b[V];
                EACH(q, V) b[q] = ldm<L>(w + L * q);
                EACH(r, M) {
                    Vector<L> a = bcm<L>(x + r * S * G::SW);
                    EACH(q, V) acc[r * V + q] = fma<L>(acc[r * V + q], a, b[q]);
                }
            }
    EACH(r, M) EACH(q, V) put<L>(out + r * OP + L * q, acc[r * V + q]);
}

// COUNT outputs of one row, all channels, OP numbers apart.
template <class G, int COUNT>
INLINE void conv_row(const float *x, const float *wf, const float *bias, float *out)
{
    constexpr int V = Sizes<G>::V, OP = Sizes<G>::OP, LV = Sizes<G>::LV, S = G::S * G::SW;
    constexpr int most = V == 1 ? REGISTERS - 2 : (REGISTERS - 4) / 2;
    constexpr int tiles = (COUNT + most - 1) / most, size = COUNT / tiles, larger = COUNT % tiles;
    for (int q = 0; q < OP / LV; q++, wf += G::KH * G::KW * G::C * LV, bias += LV, out += LV) {
        const float *from = x;
        float *to = out;
        for (int i = 0; i < larger; i++, from += (size + 1) * S, to += (size + 1) * OP)
            conv_tile<G, size + 1>(from, wf, bias, to);
        for (int i = 0; i < tiles - larger; i++, from += size * S, to += size * OP)
            conv_tile<G, size>(from, wf, bias, to);
    }
}

// Eight channels fill half a wide vector: two neighbouring outputs in one. For each number of an input
// row, it and its neighbour of the next pixel are then made ready, 8 times each, in a vector that all
// outputs and the KH rows of filters share; KH such rows stay in the nearest cache.
template <class G, int COUNT> struct Doubled {
    enum {
        PLACES = COUNT + G::KW - 2,
        SIZE = PLACES * G::C * 16,
        FITS = WIDEST == 16 && Sizes<G>::OP == 8 && G::SH == 1 && G::SW == 1 && COUNT % 2 == 0 &&
               COUNT <= 2 * (REGISTERS - 4) && 4 * G::KH * SIZE <= 40 * 1024,
    };
};
#if defined(__AVX512F__)
template <class G, int COUNT>
TILE void doubled_tile(int y, const float (*table)[Doubled<G, COUNT>::SIZE], const float *w, const float *bias, float *out)
{
    constexpr int M = COUNT / 2;
    v16 acc[M];
    EACH(r, M) acc[r] = twice(bias);
    for (int kh = 0; kh < G::KH; kh++) {
        const float *p = table[(y + kh) % G::KH];
        for (int k = 0; k < G::KW * G::C; k++, p += 16, w += 8) {
            const v16 b = twice(w);
            EACH(r, M) acc[r] = fmam<16>(acc[r], b, p + 2 * r * G::C * 16);
        }
    }
    EACH(r, M) put<16>(out + 16 * r, acc[r]);
}
template <class G, int PLACES> TILE void make_ready(const float *x, float *to)
{
    for (int k = 0; k < PLACES; k++, x += G::S)
        for (int c = 0; c < G::C; c++, to += 16) put<16>(to, halves(x + c, G::S));
}
#endif

// Rows of COUNT outputs, from the first one on: `row` is called with 0, 1, 2, ...
template <class G, int COUNT, bool DOUBLED = Doubled<G, COUNT>::FITS> struct Rows {
    const float *x, *wf, *bias;
    void row(int y, float *out) { conv_row<G, COUNT>(x + y * G::SH * G::ROW, wf, bias, out); }
};
#if defined(__AVX512F__)
template <class G, int COUNT> struct Rows<G, COUNT, true> {
    const float *x, *wf, *bias;
    int ready = 0; // rows of the input
    float table[G::KH][Doubled<G, COUNT>::SIZE] __attribute__((aligned(64)));
    Rows(const float *x, const float *wf, const float *bias) : x(x), wf(wf), bias(bias) {}
    void row(int y, float *out)
    {
        for (; ready < y + G::KH; ready++)
            make_ready<G, Doubled<G, COUNT>::PLACES>(x + ready * G::ROW, table[ready % G::KH]);
        doubled_tile<G, COUNT>(y, table, wf, bias, out);
    }
};
#endif

template <class G, bool RELU> static void conv_forward(const float *x, const float *wf, const float *bias, float *act)
{
    Rows<G, G::OW> rows{x, wf, bias};
    for (int y = 0; y < G::OH; y++, act += G::OUT) {
        rows.row(y, act);
        if (RELU)
            for (int k = 0; k < G::OW * Sizes<G>::OP; k += 8) st(act + k, relu8(ld(act + k)));
    }
}

// Convolution, maximum of 2x2 squares, ReLU. `off` [OH][OW][OP] says where in x the window of each
// maximum begins. NaN wins. Of equals the first wins, as pairs are compared: across, then down, or
// (DOWN) the other way round.
template <class G, bool RELU, bool DOWN>
static void conv_pool_forward(const float *x, const float *wf, const float *bias, float *act, int32_t *off)
{
    constexpr int OP = Sizes<G>::OP, below = 2 * G::OW * OP;
    constexpr int RIGHT = G::S * G::SW, UNDER = G::ROW * G::SH;
    constexpr int near = DOWN ? below : OP, far = DOWN ? OP : below; // the square, in two steps
    constexpr int NEAR = DOWN ? UNDER : RIGHT, FAR = DOWN ? RIGHT : UNDER;
    float out[2 * below] __attribute__((aligned(64)));
    Rows<G, 2 * G::OW> rows{x, wf, bias};
    const auto wins = [](v8 b, v8 a) -> i8 { return (b > a) | (b != b); };
    for (int py = 0; py < G::OH; py++, act += G::OUT) {
        rows.row(2 * py, out), rows.row(2 * py + 1, out + below);
        for (int px = 0; px < G::OW; px++) {
            const i8 base = bi(2 * py * UNDER + 2 * px * RIGHT);
            for (int q = 0; q < OP / 8; q++, off += 8) {
                const float *p = out + 2 * px * OP + 8 * q;
                v8 a = ld(p), b = ld(p + near), c = ld(p + far), d = ld(p + far + near);
                i8 second = wins(b, a), second2 = wins(d, c);
                v8 one = pick(second, b, a), two = pick(second2, d, c);
                i8 later = wins(two, one);
                v8 m = pick(later, two, one);
                *(i8u *)off = base + picki(later, (second2 & bi(NEAR)) + bi(FAR), second & bi(NEAR));
                st(act + px * OP + 8 * q, RELU ? relu8(m) : m);
            }
        }
    }
}

// Weights [O][KH][run] as the forward pass wants them: [OP / LV][KH][KW][C][LV].
template <class G> static void turn(const float *w, float *wf)
{
    constexpr int LV = Sizes<G>::LV, R = Sizes<G>::R, K = G::KH * G::KW;
    for (int o = 0; o < G::O; o++)
        for (int k = 0; k < K; k++)
            for (int c = 0; c < G::C; c++)
                wf[((o / LV * K + k) * G::C + c) * LV + o % LV] =
                    w[(o * G::KH + k / G::KW) * R + k % G::KW * G::S + c];
}

// ------------------------------------------------------------------ backward

template <class G> static void conv_bias_backward(const float *g, float *db)
{
    constexpr int OP = Sizes<G>::OP;
    for (int q = 0; q < OP; q += 8) {
        v8 s = ld(db + q);
        for (int y = 0; y < G::OH; y++)
            for (int x = 0; x < G::OW; x++) s += ld(g + y * G::OUT + x * OP + q);
        st(db + q, s);
    }
}

// Where the window of an output begins: as pooling found, or by its place.
template <class G, bool POOLED> INLINE int window(const int32_t *off, int y, int x)
{
    if (POOLED) return off[(y * G::OW + x) * Sizes<G>::OP];
    return y * G::SH * G::ROW + x * G::SW * G::S;
}

// The places of one filter that have a gradient.
template <class G, bool POOLED> TILE int collect(const int32_t *off, const float *g, int32_t *offs, float *gs)
{
    int n = 0;
    for (int y = 0; y < G::OH; y++)
        for (int x = 0; x < G::OW; x++) {
            float gp = g[y * G::OUT + x * Sizes<G>::OP];
            offs[n] = window<G, POOLED>(off, y, x), gs[n] = gp;
            n += gp != 0;
        }
    return n;
}

// The vectors that a filter or a window is made of: where number k begins, if rows are that far apart,
// and whether it has only 8 numbers, as the last one of a row may.
template <class G> constexpr int piece(int k, int row)
{
    return k / Sizes<G>::PIECES * row + k % Sizes<G>::PIECES * WIDEST;
}
template <class G> constexpr bool narrow(int k) { return Sizes<G>::R - piece<G>(k % Sizes<G>::PIECES, 0) < WIDEST; }

// A tile of M such vectors, from number FROM on.
template <class G, int M, int FROM> struct Pieces {
    Vector<WIDEST> wide[M];
    v8 rest[M];
    INLINE_MEMBER void load(const float *p, int row)
    {
        EACH(j, M) if (narrow<G>(FROM + j)) rest[j] = ldm<8>(p + piece<G>(FROM + j, row));
        else wide[j] = ldm<WIDEST>(p + piece<G>(FROM + j, row));
    }
    INLINE_MEMBER void add(Vector<WIDEST> g, const float *p, int row)
    {
        EACH(j, M) if (narrow<G>(FROM + j)) rest[j] = fmam<8>(rest[j], low(g), p + piece<G>(FROM + j, row));
        else wide[j] = fmam<WIDEST>(wide[j], g, p + piece<G>(FROM + j, row));
    }
    INLINE_MEMBER void store(float *p, int row) const
    {
        EACH(j, M) if (narrow<G>(FROM + j)) st(p + piece<G>(FROM + j, row), rest[j]);
        else put<WIDEST>(p + piece<G>(FROM + j, row), wide[j]);
    }
};

// dw += sum over n places of g * (what the filter saw there).
template <class G, int M, int FROM>
TILE void weights_tile(long n, const float *x, const int32_t *off, const float *g, float *dw)
{
    Pieces<G, M, FROM> sum;
    sum.load(dw, Sizes<G>::R);
    for (const float *end = g + n; g != end; g++, off++) {
        const float *xp = x + *off;
        __asm__("" : "+r"(xp)); // a pointer, not an index: a third faster
        sum.add(bcm<WIDEST>(g), xp, G::ROW);
    }
    sum.store(dw, Sizes<G>::R);
}
template <class G, int FROM = 0>
INLINE void weights_tiles(long n, const float *x, const int32_t *off, const float *g, float *dw)
{
    constexpr int N = G::KH * Sizes<G>::PIECES, SIZE = even(N, REGISTERS - 3);
    if constexpr (FROM < N) {
        weights_tile<G, (FROM + SIZE <= N ? SIZE : N - FROM), FROM>(n, x, off, g, dw);
        weights_tiles<G, FROM + SIZE>(n, x, off, g, dw);
    }
}

template <class G, bool POOLED>
static void conv_weights_backward(const float *x, const int32_t *off, const float *g, float *dw)
{
    static thread_local int32_t offs[G::OH * G::OW + 1];
    static thread_local float gs[G::OH * G::OW + 1];
    for (int o = 0; o < G::O; o++, dw += Sizes<G>::N) {
        const int n = collect<G, POOLED>(off + o, g + o, offs, gs);
        weights_tiles<G>(n, x, offs, gs, dw);
    }
}

struct Entry {
    float g;
    int32_t w;
};
// d += sum over n entries of g * filter.
template <class G, int M, int FROM> TILE void pixel_tile(long n, const Entry *e, const float *w, float *d)
{
    Pieces<G, M, FROM> sum;
    sum.load(d, G::ROW);
    for (const Entry *end = e + n; e != end; e++) {
        const float *f = w + e->w;
        __asm__("" : "+r"(f));
        sum.add(bcm<WIDEST>(&e->g), f, Sizes<G>::R);
    }
    sum.store(d, G::ROW);
}
// The filters that have a gradient, for each place where a window may begin: one for each pixel that
// came out or, if pooling chose it, one of four.
template <class G, bool POOLED> struct Filters {
    enum { WAYS = POOLED ? 4 : 1, PLACES = WAYS * G::OH * G::OW };
    int n[PLACES], at[PLACES];
    Entry list[PLACES][G::O + 1];
};
template <class G, bool POOLED> TILE void collect(const int32_t *off, const float *g, Filters<G, POOLED> &to)
{
    constexpr int OP = Sizes<G>::OP, N = Sizes<G>::N, RIGHT = G::S * G::SW, UNDER = G::ROW * G::SH;
    constexpr int WAYS = Filters<G, POOLED>::WAYS;
    int place = 0;
    for (int y = 0; y < G::OH; y++)
        for (int x = 0; x < G::OW; x++, off += POOLED ? OP : 0, place += WAYS) {
            const float *gp = g + y * G::OUT + x * OP;
            const int base = (POOLED ? 2 : 1) * (y * UNDER + x * RIGHT);
            int n[4] = {0, 0, 0, 0};
            for (int o = 0; o < G::O; o++) {
                const int t = POOLED ? off[o] - base : 0, low = t >= UNDER;
                const int k = POOLED ? 2 * low + (t != low * UNDER) : 0;
                to.list[place + k][n[k]] = {gp[o], o * N};
                n[k] += gp[o] != 0;
            }
            for (int k = 0; k < WAYS; k++)
                to.n[place + k] = n[k], to.at[place + k] = base + k / 2 * UNDER + k % 2 * RIGHT;
        }
}

// One part of the filters after the other, for all places: that part stays in the nearest cache.
template <class G, bool POOLED, int FROM = 0>
INLINE void pixel_tiles(const Filters<G, POOLED> &filters, const float *w, float *dx)
{
    constexpr int N = G::KH * Sizes<G>::PIECES, SIZE = even(N, REGISTERS - 3), M = FROM + SIZE <= N ? SIZE : N - FROM;
    if constexpr (FROM < N) {
        for (int k = 0; k < filters.PLACES; k++)
            if (filters.n[k]) pixel_tile<G, M, FROM>(filters.n[k], filters.list[k], w, dx + filters.at[k]);
        pixel_tiles<G, POOLED, FROM + SIZE>(filters, w, dx);
    }
}

// dx += the gradient of the input.
template <class G, bool POOLED>
static void conv_data_backward(const int32_t *off, const float *g, const float *w, float *dx)
{
    static thread_local Filters<G, POOLED> filters;
    collect(off, g, filters);
    pixel_tiles(filters, w, dx);
}

// The gradient of a convolution is whole only after the last sample.
template <class G> static void conv_step(const Step &s, float *g, float *w)
{
    constexpr int RUN = G::KW * G::S, R = Sizes<G>::R;
    if (R > RUN) // what lies behind the run is not the filter's
        for (int k = 0; k < G::O * G::KH; k++)
            for (int t = RUN; t < R; t++) g[k * R + t] = 0;
    move_all(s, Sizes<G>::WEIGHTS, g, w);
}

// ------------------------------------------------------------------ pooling by itself

//   S, H, W, ROW                numbers per pixel; the input's size; its numbers per row
//   KH, KW, SH, SW, PH, PW      window, stride, padding
//   OH, OW, OUT                 what comes out; numbers per row of it
template <class P, class Use> INLINE void windows(Use use)
{
    for (int y = 0; y < P::OH; y++)
        for (int x = 0; x < P::OW; x++) {
            const int top = y * P::SH - P::PH, left = x * P::SW - P::PW;
            const int y0 = top < 0 ? 0 : top, y1 = top + P::KH > P::H ? P::H : top + P::KH;
            const int x0 = left < 0 ? 0 : left, x1 = left + P::KW > P::W ? P::W : left + P::KW;
            for (int q = 0; q < P::S; q += 8) use(y, x, q, y0, y1, x0, x1);
        }
}

// `off` [OH][OW][S] says where in x each maximum is.
template <class P> static void max_pool_forward(const float *x, float *act, int32_t *off)
{
    windows<P>([&](int y, int ox, int q, int y0, int y1, int x0, int x1) {
        i8 where = bi(y0 * P::ROW + x0 * P::S);
        v8 most = ld(x + y0 * P::ROW + x0 * P::S + q);
        for (int i = y0; i < y1; i++)
            for (int j = x0; j < x1; j++) {
                const v8 b = ld(x + i * P::ROW + j * P::S + q);
                const i8 wins = (b > most) | (b != b);
                most = pick(wins, b, most), where = picki(wins, bi(i * P::ROW + j * P::S), where);
            }
        st(act + y * P::OUT + ox * P::S + q, most);
        *(i8u *)(off + (y * P::OW + ox) * P::S + q) = where;
    });
}
template <class P> static void max_pool_backward(const int32_t *off, const float *g, float *dx)
{
    for (int y = 0; y < P::OH; y++)
        for (int x = 0; x < P::OW; x++)
            for (int c = 0; c < P::S; c++)
                dx[off[(y * P::OW + x) * P::S + c] + c] += g[y * P::OUT + x * P::S + c];
}

// Padding counts where P::PADDED.
template <class P> INLINE float share(int y0, int y1, int x0, int x1)
{
    return 1.0f / (P::PADDED ? P::KH * P::KW : (y1 - y0) * (x1 - x0));
}
template <class P> static void mean_pool_forward(const float *x, float *act)
{
    windows<P>([&](int y, int ox, int q, int y0, int y1, int x0, int x1) {
        v8 sum = bc(0);
        for (int i = y0; i < y1; i++)
            for (int j = x0; j < x1; j++) sum += ld(x + i * P::ROW + j * P::S + q);
        st(act + y * P::OUT + ox * P::S + q, sum * bc(share<P>(y0, y1, x0, x1)));
    });
}
template <class P> static void mean_pool_backward(const float *g, float *dx)
{
    windows<P>([&](int y, int ox, int q, int y0, int y1, int x0, int x1) {
        const v8 part = ld(g + y * P::OUT + ox * P::S + q) * bc(share<P>(y0, y1, x0, x1));
        for (int i = y0; i < y1; i++)
            for (int j = x0; j < x1; j++) {
                float *d = dx + i * P::ROW + j * P::S + q;
                st(d, ld(d) + part);
            }
    });
}

// ------------------------------------------------------------------ samples as they are stored

// Images [C][H][W] as [H][W][S], normalised; rows are ROW apart, samples SIZE.
template <int C, int H, int W, int S, int ROW, int SIZE, class Number>
static void load(long n, const Number *from, const float *scale, const float *shift, float *to)
{
    for (; n; n--, from += C * H * W, to += SIZE)
        for (int i = 0; i < H; i++)
            for (int j = 0; j < W; j++)
                for (int c = 0; c < C; c++)
                    to[i * ROW + j * S + c] = from[(c * H + i) * W + j] * scale[c] + shift[c];
}
