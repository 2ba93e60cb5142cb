/* Attention in training: softmax(scale q . k) . v of packed sequences, and its gradients.
 *
 * A branch reads the tokens of the root that it continues, and its own.  A part of the work is a root with its branches
 * for one key-value head: it adds the gradients of the root's keys in the order of the branches, whatever the threads.
 * Blocks of queries read only the keys up to the last of them, and nothing is padded but keys to a multiple of 16. */
#include "kernel.h"

enum { QUERIES = 24 };

typedef struct {
    int64_t heads, kv_heads, width, num_roots, longest_root, longest; /* of roots, and of all sequences */
    float scale;
    const int64_t *starts, *lengths;          /* of each sequence: roots, then branches */
    const int64_t *branch_ends, *branches;    /* [root]; sequences that continue root 0, then 1, ... */
    const float *qkv;                         /* as in Inputs */
    float *out;                               /* [token heads width] */
    const float *d_out;
    float *d_qkv;
} Attention;

/* Keys and values of a sequence's key-value head, as they are and transposed, and their gradients. */
typedef struct {
    int64_t length, padded;
    float *k, *v, *dk, *dv, *kt, *vt; /* [token row], [row padded] */
} Keys;

/* A block of queries of all heads that share a key-value head. */
typedef struct {
    float *q, *o, *dq, *d_o, *shares, *d_scores; /* [head query row], [head query keys] */
} Queries;

static int64_t row_of(const Attention *a) { return padded_to(a->width, 16); }
static int64_t qkv_row(const Attention *a) { return (a->heads + 2 * a->kv_heads) * a->width; }

static float *keys_room(const Attention *a, int64_t length, float *room, Keys *keys) {
    float **rows[] = {&keys->k, &keys->v, &keys->dk, &keys->dv, &keys->kt, &keys->vt};
    keys->padded = padded_to(length, 16);
    for (int i = 0; i < 6; i++, room += row_of(a) * keys->padded) *rows[i] = room;
    return room;
}

static float *queries_room(const Attention *a, int64_t keys, float *room, Queries *queries) {
    int64_t rows = a->heads / a->kv_heads * QUERIES;
    float **small[] = {&queries->q, &queries->o, &queries->dq, &queries->d_o}, **large[] = {&queries->shares, &queries->d_scores};
    for (int i = 0; i < 4; i++, room += rows * row_of(a)) *small[i] = room;
    for (int i = 0; i < 2; i++, room += rows * keys) *large[i] = room;
    return room;
}

static void read_keys(const Attention *a, int64_t sequence, int64_t kv, Keys *keys) {
    int64_t row = row_of(a), width = a->width, length = a->lengths[sequence];
    keys_room(a, length, keys->k, keys);
    keys->length = length;
    memset(keys->k, 0, 4 * row * keys->padded * 6);
    for (int64_t t = 0; t < length; t++) {
        const float *key = a->qkv + (a->starts[sequence] + t) * qkv_row(a) + (a->heads + kv) * width;
        const float *value = key + a->kv_heads * width;
        memcpy(keys->k + t * row, key, 4 * width);
        memcpy(keys->v + t * row, value, 4 * width);
        for (int64_t i = 0; i < width; i++) {
            keys->kt[i * keys->padded + t] = key[i];
            keys->vt[i * keys->padded + t] = value[i];
        }
    }
}

static void write_gradients(const Attention *a, int64_t sequence, int64_t kv, const Keys *keys) {
    for (int64_t t = 0; t < keys->length; t++) {
        float *key = a->d_qkv + (a->starts[sequence] + t) * qkv_row(a) + (a->heads + kv) * a->width;
        memcpy(key, keys->dk + t * row_of(a), 4 * a->width);
        memcpy(key + a->kv_heads * a->width, keys->dv + t * row_of(a), 4 * a->width);
    }
}

/* Softmax of a row of scores in place: `seen` ones before the gap, and `own` ones after it, of `count` in all. */
INLINE void shares_of(float *scores, int64_t seen, int64_t gap, int64_t own, int64_t count) {
    for (int64_t t = seen; t < gap; t++) scores[t] = -INFINITY;
    for (int64_t t = gap + own; t < count; t++) scores[t] = -INFINITY;
    softmax(scores, count);
}

/* c = q . before^T | q . own^T for the first `count` of their own keys; `ld` floats to the next row. */
INLINE void scores(const Attention *a, int64_t rows, const float *q, const Keys *before, const float *before_t,
                   const Keys *own, const float *own_t, int64_t count, float *c, int64_t ld) {
    Left left = {q, row_of(a), 1};
    multiply(rows, a->width, before->padded, left, before_t, before->padded, c, ld, STORE);
    multiply(rows, a->width, padded_to(count, 16), left, own_t, own->padded, c + before->padded, ld, STORE);
}

/* Queries first ... first + count - 1 of a sequence, forward or also backward.  Their gradients of keys are added. */
static void attend(const Attention *a, int64_t sequence, int64_t kv, const Keys *before, const Keys *own, int64_t first,
                   int64_t count, const Queries *at) {
    int64_t group = a->heads / a->kv_heads, row = row_of(a), width = a->width, rows = group * count, end = first + count;
    int64_t gap = before->padded, ld = gap + own->padded, keys = gap + padded_to(end, 16);
    const float *q = a->qkv + (a->starts[sequence] + first) * qkv_row(a) + kv * group * width;
    int64_t out = (a->starts[sequence] + first) * a->heads * width + kv * group * width;
    for (int64_t head = 0; head < group; head++)
        for (int64_t t = 0; t < count; t++)
            for (int64_t i = 0; i < row; i++)
                at->q[(head * count + t) * row + i] = i < width ? q[t * qkv_row(a) + head * width + i] * a->scale : 0;
    scores(a, rows, at->q, before, before->kt, own, own->kt, end, at->shares, ld);
    for (int64_t r = 0; r < rows; r++) shares_of(at->shares + r * ld, before->length, gap, first + r % count + 1, keys);
    if (!a->d_out) {
        multiply(rows, before->length, row, (Left){at->shares, ld, 1}, before->v, row, at->o, row, STORE);
        multiply(rows, end, row, (Left){at->shares + gap, ld, 1}, own->v, row, at->o, row, ADD);
        for (int64_t head = 0; head < group; head++)
            for (int64_t t = 0; t < count; t++)
                memcpy(a->out + out + (t * a->heads + head) * width, at->o + (head * count + t) * row, 4 * width);
        return;
    }
    for (int64_t head = 0; head < group; head++)
        for (int64_t t = 0; t < count; t++)
            for (int64_t i = 0; i < row; i++)
                at->d_o[(head * count + t) * row + i] = i < width ? a->d_out[out + (t * a->heads + head) * width + i] : 0;
    scores(a, rows, at->d_o, before, before->vt, own, own->vt, end, at->d_scores, ld);
    for (int64_t r = 0; r < rows; r++) { /* d scores = shares (d shares - sum of shares d shares) */
        float *shares = at->shares + r * ld, *d_scores = at->d_scores + r * ld;
        vec along = splat(0);
        for (int64_t t = 0; t < keys; t += LANES) along += *(vec *)(shares + t) * *(vec *)(d_scores + t);
        float total = sum_of(along);
        for (int64_t t = 0; t < keys; t += LANES) *(vec *)(d_scores + t) = *(vec *)(shares + t) * (*(vec *)(d_scores + t) - total);
    }
    multiply(rows, before->length, row, (Left){at->d_scores, ld, 1}, before->k, row, at->dq, row, STORE);
    multiply(rows, end, row, (Left){at->d_scores + gap, ld, 1}, own->k, row, at->dq, row, ADD);
    multiply(before->length, rows, row, (Left){at->d_scores, 1, ld}, at->q, row, before->dk, row, ADD);
    multiply(end, rows, row, (Left){at->d_scores + gap, 1, ld}, at->q, row, own->dk, row, ADD);
    multiply(before->length, rows, row, (Left){at->shares, 1, ld}, at->d_o, row, before->dv, row, ADD);
    multiply(end, rows, row, (Left){at->shares + gap, 1, ld}, at->d_o, row, own->dv, row, ADD);
    float *d_q = a->d_qkv + (a->starts[sequence] + first) * qkv_row(a) + kv * group * width;
    for (int64_t head = 0; head < group; head++)
        for (int64_t t = 0; t < count; t++)
            for (int64_t i = 0; i < width; i++)
                d_q[t * qkv_row(a) + head * width + i] = at->dq[(head * count + t) * row + i] * a->scale;
}

static void all_queries(const Attention *a, int64_t sequence, int64_t kv, const Keys *before, const Keys *own, const Queries *at) {
    for (int64_t first = 0; first < own->length; first += QUERIES)
        attend(a, sequence, kv, before, own, first, smaller(QUERIES, own->length - first), at);
}

/* A root and its branches, for one key-value head. */
static void root_part(const void *given, int64_t index, float *room) {
    const Attention *a = given;
    int64_t root = index / a->kv_heads, kv = index % a->kv_heads, first = root ? a->branch_ends[root - 1] : 0;
    Keys nothing = {0}, before, own;
    Queries queries;
    room = keys_room(a, a->longest_root, room, &before);
    room = keys_room(a, a->longest, room, &own);
    queries_room(a, padded_to(a->longest_root, 16) + padded_to(a->longest, 16), room, &queries);
    read_keys(a, root, kv, &before);
    all_queries(a, root, kv, &nothing, &before, &queries);
    for (int64_t i = first; i < a->branch_ends[root]; i++) {
        read_keys(a, a->branches[i], kv, &own);
        all_queries(a, a->branches[i], kv, &before, &own, &queries);
        if (a->d_out) write_gradients(a, a->branches[i], kv, &own);
    }
    if (a->d_out) write_gradients(a, root, kv, &before);
}

/* Forward, or backward where there is d_out. */
int attention(const Attention *a, int64_t num_threads) {
    int64_t most = padded_to(a->longest_root, 16) + padded_to(a->longest, 16), row = row_of(a);
    int64_t room = 6 * row * most + a->heads / a->kv_heads * QUERIES * (4 * row + 2 * most);
    return in_parallel((Job){root_part, a, a->num_roots * a->kv_heads, room, 0, 0}, num_threads);
}
