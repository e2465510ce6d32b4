// One pass over rows of a bank: the product of every row with a vector, its distance if asked for,
// and a step of some rows towards the vector. What is in memory is read once, and what changes is
// written once, whatever the format of the rows.
//
// A row's numbers depend on that row, the vector and the row's own weight: not on its neighbours,
// where it lies in memory, or who works on it. So they are the same for any division of the rows.
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
typedef float vec __attribute__((vector_size(32)));
typedef int32_t ivec __attribute__((vector_size(32)));
typedef uint32_t uvec __attribute__((vector_size(32)));

constexpr int LANES = 8;
constexpr int GROUP = 128; // numbers that are taken together; in 8 bits they share a scale
constexpr int STRIP = 32;  // groups whose sum is taken in single precision

INLINE vec load(const float *from)
{
    vec a;
    memcpy(&a, from, sizeof a);
    return a;
}
INLINE void store(float *to, vec a) { memcpy(to, &a, sizeof a); }
INLINE vec magnitude(vec a) { return (vec)((ivec)a & 0x7fffffff); }
INLINE double total(vec a)
{
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += a[i];
    return sum;
}

// Random numbers by name: a key for every row, and a number for every column.
INLINE uint64_t scrambled(uint64_t x) // splitmix64
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
INLINE uvec shuffled(uvec x) // lowbias32, by C. Wellons
{
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}
INLINE vec chances(uint64_t key, uint32_t column) // in [0, 1)
{
    uvec columns = uvec{0, 1, 2, 3, 4, 5, 6, 7} + column;
    uvec drawn = shuffled(shuffled(columns + (uint32_t)key) + (uint32_t)(key >> 32));
    return __builtin_convertvector((ivec)(drawn >> 8), vec) * 0x1p-24f;
}

// How a group of numbers is stored. `read` says where they are as single numbers, in `room` if they
// are not so stored; `keep` stores what is in `room`, and leaves there what has been stored.
// `valid`: how many there are; what lies behind the last number of a row is not used nor written.
struct Single {
    static constexpr int size = 4 * GROUP;
    static constexpr bool rounds = false;
    INLINE const float *read(const char *at, float *room, int valid)
    {
        if (valid == GROUP) return (const float *)at;
        memset(room, 0, 4 * GROUP);
        memcpy(room, at, 4 * valid);
        return room;
    }
    INLINE void keep(char *at, float *room, int valid, uint64_t, uint32_t)
    {
        memcpy(at, room, 4 * valid);
    }
};

struct Half {
    static constexpr int size = 2 * GROUP;
    static constexpr bool rounds = true;
#if defined(__F16C__)
    INLINE void widen(const char *from, float *to)
    {
        for (int i = 0; i < GROUP; i += 8) {
            __m128i halves = _mm_loadu_si128((const __m128i *)(from + 2 * i));
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
        }
    }
    INLINE void narrow(const float *from, char *to)
    {
        for (int i = 0; i < GROUP; i += 8) {
            __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
            _mm_storeu_si128((__m128i *)(to + 2 * i), halves);
        }
    }
#else
    INLINE void widen(const char *from, float *to)
    {
        _Float16 halves[GROUP];
        memcpy(halves, from, size);
        for (int i = 0; i < GROUP; i++) to[i] = (float)halves[i];
    }
    INLINE void narrow(const float *from, char *to)
    {
        _Float16 halves[GROUP];
        for (int i = 0; i < GROUP; i++) halves[i] = (_Float16)from[i];
        memcpy(to, halves, size);
    }
#endif
    INLINE const float *read(const char *at, float *room, int valid)
    {
        if (valid == GROUP) {
            widen(at, room);
        } else {
            alignas(32) char whole[size] = {};
            memcpy(whole, at, 2 * valid);
            widen(whole, room);
        }
        return room;
    }
    INLINE void keep(char *at, float *room, int valid, uint64_t, uint32_t)
    {
        alignas(32) char whole[size];
        narrow(room, whole);
        memcpy(at, whole, 2 * valid);
        widen(whole, room);
    }
};

struct Int8 { // 128 integers, then their scale; the last group of a row is filled up with zeros
    static constexpr int size = GROUP + 4;
    static constexpr bool rounds = true;
    INLINE const float *read(const char *at, float *room, int)
    {
        float scale;
        memcpy(&scale, at + GROUP, 4);
        const int8_t *codes = (const int8_t *)at;
        for (int i = 0; i < GROUP; i++) room[i] = codes[i] * scale;
        return room;
    }
    INLINE void keep(char *at, float *room, int, uint64_t key, uint32_t column)
    {
        vec largest = {}, spoilt = {}; // the latter is NaN where a number is not finite, else 0
        for (int i = 0; i < GROUP; i += LANES) {
            vec size = magnitude(load(room + i));
            largest = size > largest ? size : largest;
            spoilt += size * 0.0f;
        }
        float scale = 0;
        for (int i = 0; i < LANES; i++) scale = largest[i] > scale ? largest[i] : scale;
        scale = scale / 127 + (float)total(spoilt);
        memcpy(at + GROUP, &scale, 4);
        float divisor = scale > 0 ? scale : 1;
        alignas(32) int32_t codes[GROUP];
        for (int i = 0; i < GROUP; i += LANES) {
            vec exact = load(room + i) / divisor;
            ivec code = __builtin_convertvector(exact, ivec); // towards 0
            code += exact < __builtin_convertvector(code, vec); // down: a comparison is -1 or 0
            code -= chances(key, column + i) < exact - __builtin_convertvector(code, vec);
            code = code > 127 ? ivec{} + 127 : code;
            code = code < -127 ? ivec{} - 127 : code;
            memcpy(codes + i, &code, sizeof code);
            store(room + i, __builtin_convertvector(code, vec) * scale);
        }
        for (int i = 0; i < GROUP; i++) at[i] = (char)codes[i];
    }
};

enum Measure { PRODUCT, L1, L2 };

template <Measure measure> INLINE vec apart(vec row, vec other)
{
    vec gap = row - other;
    return measure == L1 ? magnitude(gap) : gap * gap;
}

// Of `R` rows that stay as they are.
template <class Format, Measure measure, int R>
static void look(const char *rows, int64_t stride, int64_t size, const float *vector,
                 double *products, double *distances)
{
    double sums[R] = {}, gaps[R] = {};
    int64_t groups = (size + GROUP - 1) / GROUP;
    for (int64_t first = 0; first < groups; first += STRIP) {
        int64_t last = first + STRIP < groups ? first + STRIP : groups;
        vec sum[R] = {}, gap[R] = {};
        for (int64_t g = first; g < last; g++) {
            const char *at = rows + g * Format::size;
            int valid = size - g * GROUP < GROUP ? (int)(size - g * GROUP) : GROUP;
            alignas(32) float room[R][GROUP];
            const float *values[R];
            for (int r = 0; r < R; r++) values[r] = Format::read(at + r * stride, room[r], valid);
            for (int i = 0; i < GROUP; i += LANES) {
                vec other = load(vector + g * GROUP + i);
                for (int r = 0; r < R; r++) {
                    vec value = load(values[r] + i);
                    sum[r] += value * other;
                    if (measure != PRODUCT) gap[r] += apart<measure>(value, other);
                }
            }
        }
        for (int r = 0; r < R; r++) {
            sums[r] += total(sum[r]);
            if (measure != PRODUCT) gaps[r] += total(gap[r]);
        }
    }
    for (int r = 0; r < R; r++) {
        products[r] = sums[r];
        if (measure != PRODUCT) distances[r] = gaps[r];
    }
}

// Of one row, which moves.
template <class Format, Measure measure>
static void move(char *row, int64_t size, const float *vector, float weight, uint64_t key,
                 double *product, double *distance, double *square)
{
    // from the nearer end, so that a weight of 1 replaces the row
    bool near = fabsf(weight) < 0.5f;
    float factor = near ? weight : weight - 1;
    double sums = 0, gaps = 0, squares = 0;
    int64_t groups = (size + GROUP - 1) / GROUP;
    for (int64_t first = 0; first < groups; first += STRIP) {
        int64_t last = first + STRIP < groups ? first + STRIP : groups;
        vec sum = {}, gap = {}, norm = {};
        for (int64_t g = first; g < last; g++) {
            char *at = row + g * Format::size;
            int valid = size - g * GROUP < GROUP ? (int)(size - g * GROUP) : GROUP;
            alignas(32) float room[GROUP];
            const float *values = Format::read(at, room, valid);
            for (int i = 0; i < GROUP; i += LANES) {
                vec value = load(values + i), other = load(vector + g * GROUP + i);
                sum += value * other;
                if (measure != PRODUCT) gap += apart<measure>(value, other);
                store(room + i, (near ? value : other) + factor * (other - value));
            }
            Format::keep(at, room, valid, key, (uint32_t)(g * GROUP));
            if (Format::rounds)
                for (int i = 0; i < GROUP; i += LANES) norm += load(room + i) * load(room + i);
        }
        sums += total(sum), gaps += total(gap), squares += total(norm);
    }
    *product = sums, *distance = gaps, *square = squares;
}

template <class Format, Measure measure>
static void sweep(char *rows, int64_t stride, int64_t count, int64_t size, const float *vector,
                  const double *weights, uint64_t key, double *products, double *distances,
                  double *squares)
{
    constexpr int R = 4;
    for (int64_t r = 0; r < count;) {
        char *row = rows + r * stride;
        int64_t same = r;
        while (same < count && same < r + R && weights[same] == 0) same++;
        if (same == r + R) {
            look<Format, measure, R>(row, stride, size, vector, products + r, distances + r);
            r += R;
        } else if (same > r) {
            look<Format, measure, 1>(row, stride, size, vector, products + r, distances + r);
            r++;
        } else {
            uint64_t own = scrambled(key + (uint64_t)r);
            move<Format, measure>(row, size, vector, (float)weights[r], own, products + r,
                                  distances + r, squares + r);
            r++;
        }
    }
}

template <class Format>
static void measured(int measure, char *rows, int64_t stride, int64_t count, int64_t size,
                     const float *vector, const double *weights, uint64_t key, double *products,
                     double *distances, double *squares)
{
    auto pass = measure == L1   ? sweep<Format, L1>
                : measure == L2 ? sweep<Format, L2>
                                : sweep<Format, PRODUCT>;
    pass(rows, stride, count, size, vector, weights, key, products, distances, squares);
}

// `rows`: `count` rows of `size` numbers of `bits` bits, `stride` bytes apart. `vector` is filled up
// with zeros to a multiple of 128. `key` names the random numbers of the first row; rows follow on.
extern "C" void polytempo_sweep(int bits, int measure, char *rows, int64_t stride, int64_t count,
                                int64_t size, const float *vector, const double *weights,
                                uint64_t key, double *products, double *distances, double *squares)
{
    auto pass = bits == 8 ? measured<Int8> : bits == 16 ? measured<Half> : measured<Single>;
    pass(measure, rows, stride, count, size, vector, weights, key, products, distances, squares);
}
