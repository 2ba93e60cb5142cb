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
#include "kernel.h"

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

/* --- the parts of a layer ------------------------------------------------------------------------------------------ */

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
        softmax(own, room);
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

/* exp(logit / temperature - largest) in place, and zeros in the rest of the last panel; the sum of all in float64, and the
 * largest.  Each lane adds up its own. */
INLINE double exponentials(float *logits, int64_t vocab, float temperature, float *largest) {
    vec most = splat(-INFINITY);
    wide totals = {0};
    for (int64_t v = vocab; v < padded_to(vocab, PANEL); v++) logits[v] = -INFINITY;
    for (int64_t v = 0; v < vocab; v += LANES) {
        *(vec *)(logits + v) = *(vec *)(logits + v) / temperature;
        most = larger(most, *(vec *)(logits + v));
    }
    for (int lane = 1; lane < LANES; lane++) most[0] = most[lane] > most[0] ? most[lane] : most[0];
    for (int64_t v = 0; v < vocab; v += LANES) {
        vec some = exp_of(*(vec *)(logits + v) - most[0]);
        *(vec *)(logits + v) = some;
        totals += __builtin_convertvector(some, wide);
    }
    for (int lane = 1; lane < LANES; lane++) totals[0] += totals[lane];
    *largest = most[0];
    return totals[0];
}

/* The first token whose cumulative weight exceeds `target`; without one, the last that has a weight. */
INLINE int64_t reached(const float *weights, int64_t vocab, double target) {
    double sum = 0;
    for (int64_t first = 0; first < vocab; first += AT_ONCE * PANEL) {
        int64_t end = smaller(first + AT_ONCE * PANEL, vocab);
        wide sums = {0};
        for (int64_t v = first; v < end; v += LANES) sums += __builtin_convertvector(*(vec *)(weights + v), wide);
        for (int lane = 1; lane < LANES; lane++) sums[0] += sums[lane];
        if (sum + sums[0] <= target) {
            sum += sums[0];
            continue;
        }
        for (int64_t v = first; v < end; v++)
            if ((sum += weights[v]) > target) return v;
    }
    int64_t last = vocab - 1;
    while (last && !(weights[last] > 0)) last--;
    return last;
}

/* The first token whose cumulative weight exceeds u of the total, or the likeliest; and its log-prob in nats. */
INLINE int64_t draw(float *logits, const Decoding *d, int64_t vocab, double uniform, double *logprob) {
    float largest;
    int64_t token = 0;
    for (int64_t i = 0; i < d->num_suppressed; i++) logits[d->suppressed[i]] = -INFINITY;
    for (int64_t v = 1; d->greedy && v < vocab; v++) token = logits[v] > logits[token] ? v : token;
    double total = exponentials(logits, vocab, d->temperature, &largest);
    if (!d->greedy) token = reached(logits, vocab, uniform * total);
    *logprob = isfinite(largest) && isfinite(total) ? log(logits[token] / total) : NAN;
    return token;
}

/* --- rows ---------------------------------------------------------------------------------------------------------- */

static int64_t padded_vocab(const Model *m) { return (m->vocab + PANEL - 1) / PANEL * PANEL; }

enum { NUM_ARRAYS = 7 };

/* Share `all` among the arrays of some rows; returns how many floats they take. */
static int64_t share(const Model *m, int64_t rows, int64_t longest, float *all, Work *w) {
    int64_t pages = (longest + PAGE) / PAGE + 1, whole = 0;
    int64_t sizes[] = {rows * m->hidden, rows * m->hidden, rows * (m->heads + 2 * m->kv_heads) * m->width,
                       rows * m->heads * m->width, rows * m->inner, 2 * pages * PAGE, smaller(rows, CHUNK) * padded_vocab(m)};
    float **arrays[] = {&w->x, &w->normed, &w->qkv, &w->attended, &w->inner, &w->scores, &w->logits};
    for (int i = 0; i < NUM_ARRAYS; whole += (sizes[i++] + 2 * PANEL + 15) / 16 * 16) *arrays[i] = all + whole;
    return whole;
}

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

/* Log-probs of the wanted tokens among `count` that were run. */
static void score_tokens(const Model *m, const Scoring *s, const Work *w, int64_t first, int64_t count) {
    int64_t any = 0, stride = padded_vocab(m);
    for (int64_t i = 0; i < count; i++) any |= s->wanted[first + i] >= 0;
    for (int64_t i = 0; any && i < count; i++) {
        if (i % CHUNK == 0)
            product(smaller(CHUNK, count - i), w->normed + i * m->hidden, m->hidden, m->head, NULL, w->logits, stride, STORE);
        int64_t token = s->wanted[first + i];
        if (token < 0) continue;
        float largest, *logits = w->logits + i % CHUNK * stride;
        double own = logits[token] / s->temperature, total = exponentials(logits, m->vocab, s->temperature, &largest);
        s->logprobs[first + i] = own - largest - log(total);
    }
}

/* Log-probs of a sequence's tokens, LONG of them after the others. */
static void score_sequence(const Model *m, const Scoring *s, Work *w, int64_t sequence) {
    float *const *pages[LONG];
    int64_t positions[LONG], end = s->starts[sequence + 1];
    for (int64_t i = 0; i < LONG; i++) pages[i] = s->pages + sequence * s->max_pages;
    for (int64_t first = s->starts[sequence]; first < end; first += LONG) {
        int64_t count = smaller(LONG, end - first);
        for (int64_t i = 0; i < count; i++) positions[i] = s->cached[sequence] + first - s->starts[sequence] + i;
        forward(m, w, count, s->tokens + first, positions, pages);
        score_tokens(m, s, w, first, count);
    }
}

typedef struct {
    const Model *model;
    const Decoding *decoding;
    const Scoring *scoring;
    int64_t chunk, longest;
} Rows;

static void run_rows(const void *given, int64_t index, float *room) {
    const Rows *r = given;
    Work w;
    share(r->model, r->chunk, r->longest, room, &w);
    if (r->scoring) {
        score_sequence(r->model, r->scoring, &w, index);
        return;
    }
    int64_t first = index * r->chunk, left = r->decoding->num_rows - first;
    decode_chunk(r->model, r->decoding, &w, first, left < r->chunk ? left : r->chunk);
}

static int run(const Rows *r, int64_t num_parts, int64_t num_threads) {
    Work sizes;
    return in_parallel((Job){run_rows, r, num_parts, share(r->model, r->chunk, r->longest, NULL, &sizes), 0, 0}, num_threads);
}

/* Decode up to `num_steps` tokens of every row; 0, or 1 where there is no memory. */
int decode(const Model *model, const Decoding *decoding, int64_t longest, int64_t num_threads) {
    int64_t each = (decoding->num_rows + num_threads - 1) / num_threads, chunk = each < 1 ? 1 : each < CHUNK ? each : CHUNK;
    Rows rows = {model, decoding, NULL, chunk, longest};
    return run(&rows, (decoding->num_rows + chunk - 1) / chunk, num_threads);
}

int score(const Model *model, const Scoring *scoring, int64_t longest, int64_t num_threads) {
    Rows rows = {model, NULL, scoring, LONG, longest};
    return run(&rows, scoring->num_sequences, num_threads);
}

int panel_columns(void) { return PANEL; }
int page_tokens(void) { return PAGE; }
