/* What the other files share: vectors, products in registers, norms, and threads.
 *
 * Every sum of a product runs over its inputs in order, so a row has the same bits whatever rows are computed with it. */
#pragma once
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, TILE = 12 };
#elif defined(__AVX2__)
enum { LANES = 8, TILE = 6 };
#else
enum { LANES = 4, TILE = 6 };
#endif
enum { PANEL = 2 * LANES, PAGE = 16, CHUNK = 24, LONG = 96, VECTORS = PAGE / LANES, AT_ONCE = 4, NEAR = 256, FAR = 512 };

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef double wide __attribute__((vector_size(8 * LANES), aligned(8), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))
#define SHARED static __attribute__((noinline, unused))

INLINE int64_t smaller(int64_t one, int64_t other) { return one < other ? one : other; }

INLINE int64_t padded_to(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

INLINE vec splat(float value) { return (vec){0} + value; }

INLINE vec choose(ivec which, vec one, vec other) { return (vec)((which & (ivec)one) | (~which & (ivec)other)); }

INLINE vec larger(vec one, vec other) { return choose(one > other, one, other); }

INLINE vec exp_of(vec x) { /* within 2 units in the last place (Cephes' polynomial); 0 below -87 */
    ivec tiny = x < splat(-87.0f);
    x = choose(x > splat(88.0f), splat(88.0f), choose(tiny, splat(-87.0f), x));
    vec whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    vec r = x - whole * 0.693359375f;
    r = r - whole * -2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec power = (__builtin_convertvector(whole, ivec) + 127) << 23;
    return choose(tiny, splat(0), p * (vec)power);
}

INLINE float sum_of(vec x) {
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += x[lane];
    return total;
}

/* --- products: rows of a times panels of PANEL columns ------------------------------------------------------------- */

enum Epilogue { STORE, ADD, GATED, CONTINUE }; /* CONTINUE goes on with the sums in c */

/* One tile: `rows` rows by `vectors` vectors of columns; both are constants wherever this is expanded.
 *
 * Element (row, k) of a is a[row * lda + k * step]; columns of row k of the panel are at panel + k * stride. */
INLINE void tile(int rows, int vectors, const float *a, int64_t lda, int64_t step, const float *panel, int64_t stride,
                 int64_t inputs, const float *bias, float *c, int64_t ldc, int64_t columns, enum Epilogue epilogue) {
    vec low[TILE], high[TILE];
    for (int row = 0; row < rows; row++) {
        const float *from = epilogue == CONTINUE ? c + row * ldc : bias;
        low[row] = from ? *(const vec *)from : splat(0);
        high[row] = from && vectors == 2 ? *(const vec *)(from + LANES) : splat(0);
    }
    for (int64_t k = 0; k < inputs; k++) {
        vec left = *(const vec *)(panel + k * stride), right = vectors == 2 ? *(const vec *)(panel + k * stride + LANES) : left;
        for (int row = 0; row < rows; row++) {
            vec value = splat(a[row * lda + k * step]);
            low[row] += value * left;
            if (vectors == 2) high[row] += value * right;
        }
    }
    for (int row = 0; row < rows; row++) {
        float *to = c + row * ldc;
        if (epilogue == GATED) { /* the left half has gates, the right half what they gate */
            low[row] = low[row] / (1.0f + exp_of(-low[row])) * high[row];
            memcpy(to, &low[row], 4 * (columns < LANES ? columns : LANES));
            continue;
        }
        if (vectors == 1) {
            if (epilogue == ADD) low[row] += *(vec *)to;
            *(vec *)to = low[row];
            continue;
        }
        if (columns >= PANEL) {
            vec *one = (vec *)to, *other = (vec *)(to + LANES);
            if (epilogue == ADD) low[row] += *one, high[row] += *other;
            *one = low[row], *other = high[row];
            continue;
        }
        float whole[PANEL];
        memcpy(whole, &low[row], sizeof low[row]);
        memcpy(whole + LANES, &high[row], sizeof high[row]);
        for (int64_t column = 0; column < columns; column++) to[column] = (epilogue == ADD ? to[column] : 0) + whole[column];
    }
}

/* c = a . W^T + bias, added to c, or gated.  `outputs` are the columns of c; W is in panels. */
SHARED void product(int64_t rows, const float *a, int64_t inputs, const float *panels, const float *bias, float *c,
                    int64_t outputs, enum Epilogue epilogue) {
    int64_t width = epilogue == GATED ? LANES : PANEL;
    for (int64_t column = 0; column < outputs; column += width, panels += inputs * PANEL) {
        const float *own = bias ? bias + column : NULL;
        int64_t row = 0, left = outputs - column;
#define SOME(count)                                                                                                     \
    for (; row + count <= rows; row += count)                                                                           \
        tile(count, 2, a + row * inputs, inputs, 1, panels, PANEL, inputs, own, c + row * outputs + column, outputs,    \
             left, epilogue);
        SOME(TILE) SOME(4) SOME(2) SOME(1)
#undef SOME
    }
}

typedef struct {
    const float *at;
    int64_t row, column; /* floats to the next row, and to the next column */
} Left;

/* c = a . b, or added to c.  Columns are a multiple of LANES; `ldb` and `ldc` are floats to the next row. */
SHARED void multiply(int64_t rows, int64_t inputs, int64_t columns, Left a, const float *b, int64_t ldb, float *c,
                     int64_t ldc, enum Epilogue epilogue) {
    float packed[NEAR * PANEL];
    int64_t packs = rows >= 4 * TILE && ldb >= FAR && (epilogue == STORE || inputs <= NEAR), most = packs ? NEAR : inputs + !inputs;
    for (int64_t column = 0; column < columns; column += PANEL)
        for (int64_t k = 0; !k || k < inputs; k += most) { /* without inputs, c = 0 */
            int64_t row = 0, depth = smaller(most, inputs - k), whole = columns - column >= PANEL, stride = ldb;
            const float *panel = b + k * ldb + column;
            enum Epilogue how = k ? CONTINUE : epilogue;
            if (packs && whole) { /* rows that are far from each other come near */
                for (int64_t i = 0; i < depth; i++) memcpy(packed + i * PANEL, panel + i * ldb, 4 * PANEL);
                panel = packed, stride = PANEL;
            }
#define SOME(count, vectors)                                                                                            \
    for (; row + count <= rows; row += count)                                                                           \
        tile(count, vectors, a.at + row * a.row + k * a.column, a.row, a.column, panel, stride, depth, NULL,            \
             c + row * ldc + column, ldc, PANEL, how);
            if (whole) {
                SOME(TILE, 2) SOME(4, 2) SOME(2, 2) SOME(1, 2)
            } else {
                SOME(TILE, 1) SOME(4, 1) SOME(2, 1) SOME(1, 1)
            }
#undef SOME
        }
}

/* --- the parts of a layer ------------------------------------------------------------------------------------------ */

/* y = w . x / sqrt(mean(x^2) + eps); y may be x. */
INLINE void rms_norm(const float *x, const float *weight, int64_t width, float eps, float *y) {
    vec squares = splat(0);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        vec some = *(const vec *)(x + i);
        squares += some * some;
    }
    float total = sum_of(squares);
    for (int64_t j = i; j < width; j++) total += x[j] * x[j];
    float inverse = 1.0f / sqrtf(total / width + eps);
    for (i = 0; i < width; i++) y[i] = x[i] * inverse * weight[i];
}

/* Softmax in place; `count` is a multiple of LANES. */
INLINE void softmax(float *scores, int64_t count) {
    vec most = splat(-INFINITY), total = splat(0);
    for (int64_t i = 0; i < count; i += LANES) most = larger(most, *(vec *)(scores + i));
    float largest = most[0];
    for (int lane = 1; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
    for (int64_t i = 0; i < count; i += LANES) {
        vec some = exp_of(*(vec *)(scores + i) - largest);
        *(vec *)(scores + i) = some;
        total += some;
    }
    float inverse = 1.0f / sum_of(total);
    for (int64_t i = 0; i < count; i += LANES) *(vec *)(scores + i) *= inverse;
}

/* Turn the pairs (x_i, x_{i + turned/2}) by the angles of a position. */
INLINE void rotate(float *x, const float *cos, const float *sin, int64_t turned) {
    int64_t half = turned / 2;
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[i + half];
        x[i] = first * cos[i] + second * sin[i];
        x[i + half] = second * cos[i + half] + first * sin[i + half];
    }
}


/* --- threads ------------------------------------------------------------------------------------------------------- */

/* Independent parts of some work; a part gets `room` floats for what it computes on the way. */
typedef struct {
    void (*part)(const void *given, int64_t index, float *room);
    const void *given;
    int64_t num_parts, room;
    _Atomic int64_t next;
    _Atomic int failed;
} Job;

static void *work(void *argument) {
    Job *job = argument;
    float *room = aligned_alloc(64, 4 * (job->room + 2 * PANEL + 15) / 64 * 64 + 64);
    int64_t index;
    if (!room) job->failed = 1;
    while (room && (index = atomic_fetch_add(&job->next, 1)) < job->num_parts) job->part(job->given, index, room);
    free(room);
    return NULL;
}

/* Do all parts; 0, or 1 where there is no memory. */
static int in_parallel(Job job, int64_t num_threads) {
    pthread_t threads[64];
    int64_t started = 0;
    num_threads = num_threads > 64 ? 64 : num_threads;
    while (started < num_threads - 1 && started < job.num_parts - 1 && !pthread_create(threads + started, NULL, work, &job))
        started++;
    work(&job);
    for (int64_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
    return job.failed;
}
