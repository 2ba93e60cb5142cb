/* A decoder's forward pass over a few dozen tokens at a time: sampling and scoring of rows that share a process.
 *
 *     x <- x + out . attention(rotate(norm(q, k)), v);  x <- x + down . (silu(gate . h) * (up . h)),  h = norm(x)
 *
 * Rows are independent: what is computed of one has the same bits whatever the others are.  Every sum of a product runs
 * over its inputs in order, and every sum of an attention over its tokens.  So threads take rows, and never wait for
 * each other.
 *
 * Keys and values lie in pages of PAGE tokens, of all layers: [layer kv_head][keys: width PAGE | values: PAGE padded].
 * Rows with a common beginning share its pages.  All floats are float32; a draw adds up in float64. */
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
enum { PANEL = 2 * LANES, PAGE = 16, CHUNK = 24, VECTORS = PAGE / LANES, AT_ONCE = 4 };

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const float *input_norm, *mlp_norm, *head_norm; /* head_norm: [heads + kv_heads width], or NULL */
    const float *qkv, *qkv_bias, *out, *out_bias, *gate_up, *down; /* panels, see pack_panels in native_decoder.py */
} Layer;

typedef struct {
    const Layer *layers;
    const float *embedding, *last_norm, *head, *cos, *sin; /* cos and sin: [position turned], sin negated in its first half */
    int64_t num_layers, hidden, heads, kv_heads, width, padded, turned, inner, vocab;
    float eps, scale;
} Model;

typedef struct {
    int64_t num_rows, num_steps, max_pages, greedy, num_stops, num_suppressed;
    const int64_t *tokens, *lengths; /* of each row: the newest token, and how many are cached before it */
    const int64_t *given, *num_given; /* [row step]: tokens that follow it and are not drawn; how many */
    float *const *pages;             /* [row max_pages] */
    const double *uniforms;          /* [row step] */
    const int64_t *limits, *stops, *suppressed; /* how many tokens a row may still get; tokens that end it; never drawn */
    float temperature;
    int64_t *drawn;   /* [row step]; NULL returns logits of one step instead */
    double *logprobs; /* [row step] */
    int64_t *counts;  /* tokens that each row got */
    float *logits;    /* [row vocab] */
} Decoding;

typedef struct {
    int64_t num_sequences, max_pages;
    const int64_t *tokens, *starts, *cached, *wanted; /* packed; [sequence + 1]; how many tokens its pages hold; [token] the
                                                       next token whose log-prob is wanted, or -1 */
    float *const *pages;
    float temperature;
    double *logprobs; /* [token] */
} Scoring;

/* Rows of a chunk, and what is computed of them. */
typedef struct {
    float *x, *normed, *qkv, *attended, *inner, *scores, *logits;
} Work;

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

enum Epilogue { STORE, ADD, GATED };

/* One tile: `rows` rows by a panel.  `rows` is a constant wherever this is expanded. */
INLINE void tile(int rows, const float *a, int64_t lda, const float *panel, int64_t inputs, const float *bias, float *c,
                 int64_t ldc, int64_t columns, enum Epilogue epilogue) {
    vec low[TILE], high[TILE];
    for (int row = 0; row < rows; row++) {
        low[row] = bias ? *(const vec *)bias : splat(0);
        high[row] = bias ? *(const vec *)(bias + LANES) : splat(0);
    }
    for (int64_t k = 0; k < inputs; k++) {
        vec left = *(const vec *)(panel + k * PANEL), right = *(const vec *)(panel + k * PANEL + LANES);
        for (int row = 0; row < rows; row++) {
            vec value = splat(a[row * lda + k]);
            low[row] += value * left;
            high[row] += value * right;
        }
    }
    for (int row = 0; row < rows; row++) {
        float *to = c + row * ldc;
        if (epilogue == GATED) { /* the left half has gates, the right half what they gate */
            low[row] = low[row] / (1.0f + exp_of(-low[row])) * high[row];
            memcpy(to, &low[row], 4 * (columns < LANES ? columns : LANES));
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

/* c = a . W^T + bias, added to c, or gated.  `outputs` are the columns of c. */
INLINE void product(int64_t rows, const float *a, int64_t inputs, const float *panels, const float *bias, float *c,
                    int64_t outputs, enum Epilogue epilogue) {
    int64_t step = epilogue == GATED ? LANES : PANEL;
    for (int64_t column = 0; column < outputs; column += step, panels += inputs * PANEL) {
        const float *own = bias ? bias + column : NULL;
        int64_t row = 0, left = outputs - column;
        for (; row + TILE <= rows; row += TILE)
            tile(TILE, a + row * inputs, inputs, panels, inputs, own, c + row * outputs + column, outputs, left, epilogue);
        for (; row + 3 <= rows; row += 3)
            tile(3, a + row * inputs, inputs, panels, inputs, own, c + row * outputs + column, outputs, left, epilogue);
        for (; row < rows; row++)
            tile(1, a + row * inputs, inputs, panels, inputs, own, c + row * outputs + column, outputs, left, epilogue);
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

/* Turn the pairs (x_i, x_{i + turned/2}) by the angles of a position. */
INLINE void rotate(float *x, const float *cos, const float *sin, int64_t turned) {
    int64_t half = turned / 2;
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[i + half];
        x[i] = first * cos[i] + second * sin[i];
        x[i + half] = second * cos[i + half] + first * sin[i + half];
    }
}

/* Where the keys of a layer's key-value head are in a page; its values follow them. */
INLINE int64_t page_offset(const Model *m, int64_t layer, int64_t kv) {
    return (layer * m->kv_heads + kv) * PAGE * (m->width + m->padded);
}

INLINE void cache(const Model *m, float *page, int64_t layer, int64_t place, const float *key, const float *value) {
    for (int64_t kv = 0; kv < m->kv_heads; kv++) {
        float *keys = page + page_offset(m, layer, kv), *values = keys + PAGE * m->width + place * m->padded;
        for (int64_t i = 0; i < m->width; i++) keys[i * PAGE + place] = key[kv * m->width + i];
        memcpy(values, value + kv * m->width, 4 * m->width);
    }
}

/* softmax(q . k) . v of one token over `length` cached ones, for `count` heads that share a key-value head.
 *
 * `count` is a constant wherever this is expanded, so that sums of several pages and heads are under way at once. */
INLINE void attend_heads(int count, const Model *m, float *const *pages, int64_t offset, int64_t length, const float *query,
                         float *out, float *scores) {
    int64_t num_pages = (length + PAGE - 1) / PAGE, room = num_pages * PAGE, width = m->width;
    for (int64_t page = 0; page < num_pages; page += AT_ONCE) {
        vec found[AT_ONCE * VECTORS][2];
        const float *keys[AT_ONCE];
        int64_t some = num_pages - page < AT_ONCE ? num_pages - page : AT_ONCE;
        for (int p = 0; p < AT_ONCE; p++) keys[p] = pages[page + (p < some ? p : 0)] + offset;
        for (int p = 0; p < AT_ONCE * VECTORS; p++)
            for (int head = 0; head < count; head++) found[p][head] = splat(0);
        for (int64_t i = 0; i < width; i++)
            for (int p = 0; p < AT_ONCE * VECTORS; p++) {
                vec key = *(const vec *)(keys[p / VECTORS] + i * PAGE + p % VECTORS * LANES);
                for (int head = 0; head < count; head++) found[p][head] += query[head * width + i] * key;
            }
        for (int64_t p = 0; p < some * VECTORS; p++)
            for (int head = 0; head < count; head++)
                *(vec *)(scores + head * room + page * PAGE + p * LANES) = found[p][head] * m->scale;
    }
    for (int head = 0; head < count; head++) {
        float *own = scores + head * room;
        for (int64_t t = length; t < room; t++) own[t] = -INFINITY;
        vec most = splat(-INFINITY), total = splat(0);
        for (int64_t t = 0; t < room; t += LANES) most = larger(most, *(vec *)(own + t));
        float largest = most[0];
        for (int lane = 1; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
        for (int64_t t = 0; t < room; t += LANES) {
            vec some = exp_of(*(vec *)(own + t) - largest);
            *(vec *)(own + t) = some;
            total += some;
        }
        float inverse = 1.0f / sum_of(total);
        for (int64_t t = 0; t < room; t += LANES) *(vec *)(own + t) *= inverse;
    }
    for (int64_t i = 0; i < width; i += AT_ONCE * LANES) {
        vec sums[AT_ONCE][2];
        for (int p = 0; p < AT_ONCE; p++)
            for (int head = 0; head < count; head++) sums[p][head] = splat(0);
        for (int64_t page = 0, t = 0; page < num_pages; page++) {
            const float *values = pages[page] + offset + PAGE * width + i;
            for (int64_t end = t + PAGE < length ? t + PAGE : length; t < end; t++, values += m->padded)
                for (int p = 0; p < AT_ONCE; p++) {
                    vec value = *(const vec *)(values + p * LANES);
                    for (int head = 0; head < count; head++) sums[p][head] += scores[head * room + t] * value;
                }
        }
        int64_t left = width - i < AT_ONCE * LANES ? width - i : AT_ONCE * LANES;
        for (int head = 0; head < count; head++) {
            float whole[AT_ONCE * LANES];
            for (int p = 0; p < AT_ONCE; p++) *(vec *)(whole + p * LANES) = sums[p][head];
            memcpy(out + head * width + i, whole, 4 * left);
        }
    }
}

INLINE void attend(const Model *m, float *const *pages, int64_t layer, int64_t kv, int64_t length, const float *query,
                   float *out, float *scores) {
    int64_t group = m->heads / m->kv_heads, head = 0, offset = page_offset(m, layer, kv);
    for (; head + 2 <= group; head += 2)
        attend_heads(2, m, pages, offset, length, query + head * m->width, out + head * m->width, scores);
    if (head < group) attend_heads(1, m, pages, offset, length, query + head * m->width, out + head * m->width, scores);
}

/* All layers for some tokens; `pages[i]` are those of token i, `positions[i]` how many tokens are before it.  Tokens of one
 * sequence may follow each other: their keys and values are stored before any of them attends. */
static void forward(const Model *m, Work *w, int64_t rows, const int64_t *tokens, const int64_t *positions,
                    float *const *const *pages) {
    int64_t heads = m->heads, width = m->width, turning = heads + m->kv_heads, of_row = (turning + m->kv_heads) * width;
    for (int64_t row = 0; row < rows; row++)
        memcpy(w->x + row * m->hidden, m->embedding + tokens[row] * m->hidden, 4 * m->hidden);
    for (int64_t index = 0; index < m->num_layers; index++) {
        const Layer *layer = m->layers + index;
        for (int64_t row = 0; row < rows; row++)
            rms_norm(w->x + row * m->hidden, layer->input_norm, m->hidden, m->eps, w->normed + row * m->hidden);
        product(rows, w->normed, m->hidden, layer->qkv, layer->qkv_bias, w->qkv, of_row, STORE);
        for (int64_t row = 0; row < rows; row++) {
            float *qkv = w->qkv + row * of_row;
            const float *cos = m->cos + positions[row] * m->turned, *sin = m->sin + positions[row] * m->turned;
            for (int64_t head = 0; head < turning; head++) {
                float *one = qkv + head * width;
                if (layer->head_norm) rms_norm(one, layer->head_norm + head * width, width, m->eps, one);
                rotate(one, cos, sin, m->turned);
            }
            cache(m, pages[row][positions[row] / PAGE], index, positions[row] % PAGE, qkv + heads * width, qkv + turning * width);
        }
        for (int64_t row = 0; row < rows; row++)
            for (int64_t kv = 0, group = heads / m->kv_heads; kv < m->kv_heads; kv++)
                attend(m, pages[row], index, kv, positions[row] + 1, w->qkv + row * of_row + kv * group * width,
                       w->attended + (row * heads + kv * group) * width, w->scores);
        product(rows, w->attended, heads * width, layer->out, layer->out_bias, w->x, m->hidden, ADD);
        for (int64_t row = 0; row < rows; row++)
            rms_norm(w->x + row * m->hidden, layer->mlp_norm, m->hidden, m->eps, w->normed + row * m->hidden);
        product(rows, w->normed, m->hidden, layer->gate_up, NULL, w->inner, m->inner, GATED);
        product(rows, w->inner, m->inner, layer->down, NULL, w->x, m->hidden, ADD);
    }
    for (int64_t row = 0; row < rows; row++)
        rms_norm(w->x + row * m->hidden, m->last_norm, m->hidden, m->eps, w->normed + row * m->hidden);
}

/* --- drawing ------------------------------------------------------------------------------------------------------- */

/* exp(logit - largest) in place; the sum of all in float64, and the largest. */
INLINE double exponentials(float *logits, int64_t vocab, float temperature, float *largest) {
    float most = -INFINITY;
    for (int64_t v = 0; v < vocab; v++) {
        logits[v] = logits[v] / temperature;
        most = logits[v] > most ? logits[v] : most;
    }
    double total = 0;
    for (int64_t v = 0; v < vocab; v += LANES) { /* there is room for a whole panel */
        *(vec *)(logits + v) = exp_of(*(vec *)(logits + v) - most);
        for (int64_t lane = v; lane < vocab && lane < v + LANES; lane++) total += logits[lane];
    }
    *largest = most;
    return total;
}

/* The first token whose cumulative weight exceeds u of the total, or the likeliest; and its log-prob in nats. */
INLINE int64_t draw(float *logits, const Decoding *d, int64_t vocab, double uniform, double *logprob) {
    float largest;
    int64_t best = 0, token = -1, last = 0;
    for (int64_t i = 0; i < d->num_suppressed; i++) logits[d->suppressed[i]] = -INFINITY;
    for (int64_t v = 1; d->greedy && v < vocab; v++) best = logits[v] > logits[best] ? v : best;
    double total = exponentials(logits, vocab, d->temperature, &largest), sum = 0, target = uniform * total;
    if (d->greedy) {
        token = best;
    } else {
        for (int64_t v = 0; v < vocab && token < 0; v++) {
            sum += logits[v];
            if (logits[v] > 0) last = v;
            if (sum > target) token = v;
        }
        if (token < 0) token = last;
    }
    *logprob = isfinite(largest) && isfinite(total) ? log(logits[token] / total) : NAN;
    return token;
}

/* --- threads ------------------------------------------------------------------------------------------------------- */

static int64_t padded_vocab(const Model *m) { return (m->vocab + PANEL - 1) / PANEL * PANEL; }

static int room(const Model *m, int64_t rows, int64_t longest, Work *w) {
    int64_t pages = (longest + PAGE) / PAGE + 1;
    int64_t sizes[] = {rows * m->hidden, rows * m->hidden, rows * (m->heads + 2 * m->kv_heads) * m->width,
                       rows * m->heads * m->width, rows * m->inner, 2 * pages * PAGE, rows * padded_vocab(m)};
    float **parts[] = {&w->x, &w->normed, &w->qkv, &w->attended, &w->inner, &w->scores, &w->logits};
    int64_t whole = 0;
    for (int i = 0; i < 7; i++) whole += (sizes[i] + 2 * PANEL + 15) / 16 * 16;
    float *all = aligned_alloc(64, 4 * whole);
    if (!all) return 0;
    for (int i = 0; i < 7; all += (sizes[i++] + 2 * PANEL + 15) / 16 * 16) *parts[i] = all;
    return 1;
}

typedef struct {
    const Model *model;
    const Decoding *decoding;
    const Scoring *scoring;
    int64_t chunk, longest;
    _Atomic int64_t next;
    _Atomic int failed;
} Job;

/* Decode a chunk of rows until each has its tokens; rows that end leave it. */
static void decode_chunk(const Model *m, const Decoding *d, Work *w, int64_t first, int64_t count) {
    int64_t rows[CHUNK], tokens[CHUNK], positions[CHUNK], left = count;
    float *const *pages[CHUNK];
    for (int64_t i = 0; i < count; i++) {
        rows[i] = first + i;
        tokens[i] = d->tokens[first + i];
        d->counts[first + i] = 0;
    }
    for (int64_t step = 0; step < d->num_steps && left; step++) {
        for (int64_t i = 0; i < left; i++) {
            positions[i] = d->lengths[rows[i]] + step;
            pages[i] = d->pages + rows[i] * d->max_pages;
        }
        forward(m, w, left, tokens, positions, pages);
        int64_t stride = padded_vocab(m), kept = 0;
        if (!d->drawn) {
            product(left, w->normed, m->hidden, m->head, NULL, d->logits + first * m->vocab, m->vocab, STORE);
            return;
        }
        product(left, w->normed, m->hidden, m->head, NULL, w->logits, stride, STORE);
        for (int64_t i = 0; i < left; i++) {
            int64_t row = rows[i], count = step - d->num_given[row], at = row * d->num_steps + count, token, ends = 0;
            if (count < 0) {
                token = d->given[row * d->num_steps + step];
            } else {
                token = draw(w->logits + i * stride, d, m->vocab, d->uniforms[at], d->logprobs + at);
                d->drawn[at] = token;
                d->counts[row] = count + 1;
                ends = count + 1 >= d->limits[row];
                for (int64_t stop = 0; stop < d->num_stops; stop++) ends |= token == d->stops[stop];
            }
            if (ends) continue;
            rows[kept] = row;
            tokens[kept++] = token;
        }
        left = kept;
    }
}

/* Log-probs of a sequence's tokens, a chunk after the other. */
static void score_sequence(const Model *m, const Scoring *s, Work *w, int64_t sequence) {
    float *const *pages[CHUNK];
    int64_t positions[CHUNK], stride = padded_vocab(m), end = s->starts[sequence + 1];
    for (int64_t i = 0; i < CHUNK; i++) pages[i] = s->pages + sequence * s->max_pages;
    for (int64_t first = s->starts[sequence]; first < end; first += CHUNK) {
        int64_t count = end - first < CHUNK ? end - first : CHUNK, any = 0;
        for (int64_t i = 0; i < count; i++) {
            positions[i] = s->cached[sequence] + first - s->starts[sequence] + i;
            any |= s->wanted[first + i] >= 0;
        }
        forward(m, w, count, s->tokens + first, positions, pages);
        if (!any) continue;
        product(count, w->normed, m->hidden, m->head, NULL, w->logits, stride, STORE);
        for (int64_t i = 0; i < count; i++) {
            int64_t token = s->wanted[first + i];
            if (token < 0) continue;
            float largest, *logits = w->logits + i * stride;
            double own = logits[token] / s->temperature, total = exponentials(logits, m->vocab, s->temperature, &largest);
            s->logprobs[first + i] = own - largest - log(total);
        }
    }
}

static void *work(void *argument) {
    Job *job = argument;
    Work w;
    if (!room(job->model, job->decoding ? job->chunk : CHUNK, job->longest, &w)) {
        job->failed = 1;
        return NULL;
    }
    int64_t count = job->decoding ? job->decoding->num_rows : job->scoring->num_sequences, first;
    while ((first = atomic_fetch_add(&job->next, job->chunk)) < count) {
        int64_t size = count - first < job->chunk ? count - first : job->chunk;
        if (job->decoding) decode_chunk(job->model, job->decoding, &w, first, size);
        else score_sequence(job->model, job->scoring, &w, first);
    }
    free(w.x);
    return NULL;
}

static int run(Job *job, int64_t num_threads) {
    pthread_t threads[64];
    int64_t started = 0;
    num_threads = num_threads > 64 ? 64 : num_threads;
    while (started < num_threads - 1 && !pthread_create(threads + started, NULL, work, job)) started++;
    work(job);
    for (int64_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
    return job->failed;
}

/* Decode up to `num_steps` tokens of every row; 0, or 1 where there is no memory. */
int decode(const Model *model, const Decoding *decoding, int64_t longest, int64_t num_threads) {
    int64_t each = (decoding->num_rows + num_threads - 1) / num_threads;
    Job job = {model, decoding, NULL, each < CHUNK ? each : CHUNK, longest, 0, 0};
    return run(&job, num_threads);
}

int score(const Model *model, const Scoring *scoring, int64_t longest, int64_t num_threads) {
    Job job = {model, NULL, scoring, 1, longest, 0, 0};
    return run(&job, num_threads);
}

int panel_columns(void) { return PANEL; }
int page_tokens(void) { return PAGE; }
