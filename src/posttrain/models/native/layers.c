/* A layer in training, but for its attention: the arithmetic of decoder.c over packed tokens, and its gradients.
 *
 *     q, k, v = rotate(norm(W_qkv . norm(x) + b))          Inputs
 *     y = x + W_out . attended + b                         Added
 *     y = x + W_down . (silu(gate) * up),                  Mlp
 *     gate, up = W_gate_up . norm(x)
 *
 * Tokens are independent, and threads take blocks of them.  Gradients of weights are sums over tokens in order; threads
 * take outputs.  So the number of threads changes no bit.
 *
 * The forward pass reads matrices in panels (weight_panels in native_decoder.py), the backward pass as they are; it
 * needs widths that are multiples of 16. */
#include "kernel.h"

enum { BLOCK = 96, SLAB = 96, DEPTH = 256 };

/* --- norms --------------------------------------------------------------------------------------------------------- */

INLINE float inverse_rms(const float *x, int64_t width, float eps) {
    vec squares = splat(0);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) squares += *(const vec *)(x + i) * *(const vec *)(x + i);
    float total = sum_of(squares);
    for (; i < width; i++) total += x[i] * x[i];
    return 1.0f / sqrtf(total / width + eps);
}

/* dx (+)= the gradient of w . n,  n = x / rms(x):  (g - n mean(g n)) / rms,  g = w dy;  dw += dy n. */
INLINE void rms_norm_back(const float *x, const float *weight, const float *dy, int64_t width, float eps, float *dx,
                          float *dw, enum Epilogue epilogue) {
    float inverse = inverse_rms(x, width, eps);
    vec along = splat(0);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) along += *(vec *)(dy + i) * *(vec *)(weight + i) * *(vec *)(x + i);
    float total = sum_of(along);
    for (; i < width; i++) total += dy[i] * weight[i] * x[i];
    float share = total * inverse * inverse / width;
    for (i = 0; i < width; i++) {
        float found = inverse * (dy[i] * weight[i] - x[i] * share);
        dw[i] += dy[i] * x[i] * inverse;
        dx[i] = epilogue == ADD ? dx[i] + found : found;
    }
}

INLINE void rotate_back(float *x, const float *cos, const float *sin, int64_t turned) {
    int64_t half = turned / 2;
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[i + half];
        x[i] = first * cos[i] + second * sin[i + half];
        x[i + half] = second * cos[i + half] + first * sin[i];
    }
}

/* The sum of `count` rows of `width`, into the first. */
static void sum_rows(float *rows, int64_t count, int64_t width) {
    for (int64_t row = 1; row < count; row++)
        for (int64_t i = 0; i < width; i++) rows[i] += rows[row * width + i];
}

/* --- gradients of weights ------------------------------------------------------------------------------------------ */

typedef struct {
    int64_t tokens, outputs, inputs;
    const float *dy, *x; /* [token outputs], [token inputs] */
    float *dw, *db;      /* [outputs inputs], [outputs] or NULL; both begin as zeros */
} WeightGradient;

/* dw = dy^T . x for SLAB outputs. */
static void slab(const void *given, int64_t index, float *room) {
    const WeightGradient *w = given;
    int64_t first = index * SLAB, rows = smaller(SLAB, w->outputs - first);
    for (int64_t token = 0; token < w->tokens; token += DEPTH) {
        int64_t depth = smaller(DEPTH, w->tokens - token);
        for (int64_t k = 0; k < depth; k++) {
            memcpy(room + k * SLAB, w->dy + (token + k) * w->outputs + first, 4 * rows);
            for (int64_t row = 0; w->db && row < rows; row++) w->db[first + row] += room[k * SLAB + row];
        }
        multiply(rows, depth, w->inputs, (Left){room, 1, SLAB}, w->x + token * w->inputs, w->inputs,
                 w->dw + first * w->inputs, w->inputs, ADD);
    }
}

int weight_gradient(const WeightGradient *w, int64_t num_threads) {
    return in_parallel((Job){slab, w, (w->outputs + SLAB - 1) / SLAB, DEPTH * SLAB, 0, 0}, num_threads);
}

/* --- the MLP ------------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t tokens, hidden, inner;
    float eps;
    const float *x, *norm;                   /* [token hidden], [hidden] */
    const float *gate_up_panels, *down_panels;
    const float *gate_up_weight, *down_weight; /* [2 inner hidden], [hidden inner] */
    float *gate_up, *y;                      /* [token 2 inner], kept; [token hidden] */
    const float *dy;
    float *dx, *d_gate_up, *gated, *normed;  /* of [token ...]; the last three are for gradients of weights */
    float *d_norm;                           /* [block hidden] of zeros; the first row is the gradient */
} Mlp;

static void mlp_block(const void *given, int64_t index, float *room) {
    const Mlp *m = given;
    int64_t first = index * BLOCK, rows = smaller(BLOCK, m->tokens - first), hidden = m->hidden, inner = m->inner;
    const float *x = m->x + first * hidden;
    float *y = m->y + first * hidden, *gate_up = m->gate_up + first * 2 * inner, *gated = room + BLOCK * hidden;
    for (int64_t row = 0; row < rows; row++) rms_norm(x + row * hidden, m->norm, hidden, m->eps, room + row * hidden);
    product(rows, room, hidden, m->gate_up_panels, NULL, gate_up, 2 * inner, STORE);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < inner; i += LANES) {
            vec gate = *(vec *)(gate_up + row * 2 * inner + i), up = *(vec *)(gate_up + row * 2 * inner + inner + i);
            *(vec *)(gated + row * inner + i) = gate / (1.0f + exp_of(-gate)) * up;
        }
    memcpy(y, x, 4 * rows * hidden);
    product(rows, gated, inner, m->down_panels, NULL, y, hidden, ADD);
}

static void mlp_block_back(const void *given, int64_t index, float *room) {
    const Mlp *m = given;
    int64_t first = index * BLOCK, rows = smaller(BLOCK, m->tokens - first), hidden = m->hidden, inner = m->inner;
    const float *x = m->x + first * hidden, *dy = m->dy + first * hidden, *gate_up = m->gate_up + first * 2 * inner;
    float *d_gate_up = m->d_gate_up + first * 2 * inner, *gated = m->gated + first * inner, *d_normed = room;
    float *d_gated = room + BLOCK * hidden;
    multiply(rows, hidden, inner, (Left){dy, hidden, 1}, m->down_weight, inner, d_gated, inner, STORE);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < inner; i += LANES) {
            vec gate = *(vec *)(gate_up + row * 2 * inner + i), up = *(vec *)(gate_up + row * 2 * inner + inner + i);
            vec grad = *(vec *)(d_gated + row * inner + i), sigmoid = 1.0f / (1.0f + exp_of(-gate)), silu = gate * sigmoid;
            *(vec *)(gated + row * inner + i) = silu * up;
            *(vec *)(d_gate_up + row * 2 * inner + i) = grad * up * (sigmoid + silu * (1.0f - sigmoid));
            *(vec *)(d_gate_up + row * 2 * inner + inner + i) = grad * silu;
        }
    multiply(rows, 2 * inner, hidden, (Left){d_gate_up, 2 * inner, 1}, m->gate_up_weight, hidden, d_normed, hidden, STORE);
    for (int64_t row = 0; row < rows; row++) {
        float *dx = m->dx + (first + row) * hidden;
        memcpy(dx, dy + row * hidden, 4 * hidden);
        rms_norm(x + row * hidden, m->norm, hidden, m->eps, m->normed + (first + row) * hidden);
        rms_norm_back(x + row * hidden, m->norm, d_normed + row * hidden, hidden, m->eps, dx, m->d_norm + index * hidden, ADD);
    }
}

int block_tokens(void) { return BLOCK; }

static int64_t num_blocks(int64_t tokens) { return (tokens + BLOCK - 1) / BLOCK; }

int mlp_forward(const Mlp *m, int64_t num_threads) {
    return in_parallel((Job){mlp_block, m, num_blocks(m->tokens), BLOCK * (m->hidden + m->inner), 0, 0}, num_threads);
}

int mlp_backward(const Mlp *m, int64_t num_threads) {
    int64_t blocks = num_blocks(m->tokens);
    int failed = in_parallel((Job){mlp_block_back, m, blocks, BLOCK * (m->hidden + m->inner), 0, 0}, num_threads);
    sum_rows(m->d_norm, blocks, m->hidden);
    return failed;
}

/* --- queries, keys and values -------------------------------------------------------------------------------------- */

typedef struct {
    int64_t tokens, hidden, heads, kv_heads, width, turned;
    float eps;
    const float *x, *norm, *head_norm; /* [token hidden], [hidden], [heads + kv_heads width] or NULL */
    const float *panels, *bias, *weight;
    const float *cos, *sin; /* [token turned], sin negated in its first half */
    float *raw, *qkv;       /* [token (heads + 2 kv_heads) width]: raw before the norm of heads, kept; NULL without one */
    const float *d_qkv;
    float *dx, *d_raw, *normed;
    float *d_norm, *d_head_norm; /* [block ...] of zeros; the first row is the gradient */
} Inputs;

static int64_t qkv_width(const Inputs *q) { return (q->heads + 2 * q->kv_heads) * q->width; }

static void inputs_block(const void *given, int64_t index, float *room) {
    const Inputs *q = given;
    int64_t first = index * BLOCK, rows = smaller(BLOCK, q->tokens - first), hidden = q->hidden, all = qkv_width(q);
    float *qkv = q->qkv + first * all;
    for (int64_t row = 0; row < rows; row++)
        rms_norm(q->x + (first + row) * hidden, q->norm, hidden, q->eps, room + row * hidden);
    product(rows, room, hidden, q->panels, q->bias, qkv, all, STORE);
    if (q->head_norm) memcpy(q->raw + first * all, qkv, 4 * rows * all);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < q->heads + q->kv_heads; head++) {
            float *one = qkv + row * all + head * q->width;
            if (q->head_norm) rms_norm(one, q->head_norm + head * q->width, q->width, q->eps, one);
            rotate(one, q->cos + (first + row) * q->turned, q->sin + (first + row) * q->turned, q->turned);
        }
}

static void inputs_block_back(const void *given, int64_t index, float *room) {
    const Inputs *q = given;
    int64_t first = index * BLOCK, rows = smaller(BLOCK, q->tokens - first), hidden = q->hidden, all = qkv_width(q);
    int64_t turning = q->heads + q->kv_heads, width = q->width;
    float *d_raw = q->d_raw + first * all;
    memcpy(d_raw, q->d_qkv + first * all, 4 * rows * all);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < turning; head++) {
            float *one = d_raw + row * all + head * width;
            rotate_back(one, q->cos + (first + row) * q->turned, q->sin + (first + row) * q->turned, q->turned);
            if (q->head_norm)
                rms_norm_back(q->raw + (first + row) * all + head * width, q->head_norm + head * width, one, width, q->eps,
                              one, q->d_head_norm + (index * turning + head) * width, STORE);
        }
    multiply(rows, all, hidden, (Left){d_raw, all, 1}, q->weight, hidden, room, hidden, STORE);
    for (int64_t row = 0; row < rows; row++) {
        const float *x = q->x + (first + row) * hidden;
        rms_norm(x, q->norm, hidden, q->eps, q->normed + (first + row) * hidden);
        rms_norm_back(x, q->norm, room + row * hidden, hidden, q->eps, q->dx + (first + row) * hidden,
                      q->d_norm + index * hidden, STORE);
    }
}

int inputs_forward(const Inputs *q, int64_t num_threads) {
    return in_parallel((Job){inputs_block, q, num_blocks(q->tokens), BLOCK * q->hidden, 0, 0}, num_threads);
}

int inputs_backward(const Inputs *q, int64_t num_threads) {
    int64_t blocks = num_blocks(q->tokens);
    int failed = in_parallel((Job){inputs_block_back, q, blocks, BLOCK * q->hidden, 0, 0}, num_threads);
    sum_rows(q->d_norm, blocks, q->hidden);
    if (q->head_norm) sum_rows(q->d_head_norm, blocks, (q->heads + q->kv_heads) * q->width);
    return failed;
}

/* --- y = x + W . a + b --------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t tokens, inputs, outputs;
    const float *x, *a, *panels, *bias, *weight; /* weight: [outputs inputs] */
    float *y;
    const float *dy;
    float *da;
} Added;

static void added_block(const void *given, int64_t index, float *room) {
    const Added *p = given;
    int64_t first = index * BLOCK, rows = smaller(BLOCK, p->tokens - first);
    (void)room;
    memcpy(p->y + first * p->outputs, p->x + first * p->outputs, 4 * rows * p->outputs);
    product(rows, p->a + first * p->inputs, p->inputs, p->panels, p->bias, p->y + first * p->outputs, p->outputs, ADD);
}

static void added_block_back(const void *given, int64_t index, float *room) {
    const Added *p = given;
    int64_t first = index * BLOCK, rows = smaller(BLOCK, p->tokens - first);
    (void)room;
    multiply(rows, p->outputs, p->inputs, (Left){p->dy + first * p->outputs, p->outputs, 1}, p->weight, p->inputs,
             p->da + first * p->inputs, p->inputs, STORE);
}

int added_forward(const Added *p, int64_t num_threads) {
    return in_parallel((Job){added_block, p, num_blocks(p->tokens), 0, 0, 0}, num_threads);
}

int added_backward(const Added *p, int64_t num_threads) {
    return in_parallel((Job){added_block_back, p, num_blocks(p->tokens), 0, 0, 0}, num_threads);
}
