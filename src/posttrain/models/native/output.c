/* Log-probs of given tokens from hidden states, and their gradients, for large vocabularies:
 *
 *     log p(y) = z_y / T - log sum_v exp(z_v / T),  z = W . h
 *     d log p(y) / d z_v = ([v = y] - p_v) / T
 *
 * A vector holds one number of several tokens, so that W is read as it is stored.  A thread keeps SOME_LOGITS of each of its
 * tokens; the backward pass computes them again.  Each sum runs in an order that does not depend on the threads. */
#include "kernel.h"

enum { SIDE = 4 * PANEL, TOGETHER = 256, SOME_LOGITS = 96, MOST_PARTS = 32 };

typedef struct {
    int64_t tokens, hidden, vocab;
    float temperature;
    const float *h, *head;  /* [token hidden], [vocab hidden] */
    const int64_t *targets; /* [token] */
    float *logprobs, *normalisers; /* [token] */
    const float *grad;      /* [token] */
    float *dh, *dw;         /* [token hidden]; [vocab hidden], to which the gradient is added, or NULL */
} Output;

/* Panels of hidden states: [panel hidden PANEL], zeros where there is no token.  Returns the number of columns. */
static int64_t side_by_side(const float *h, int64_t count, int64_t hidden, float *panels) {
    int64_t columns = padded_to(count, PANEL);
    for (int64_t column = 0; column < columns; column++)
        for (int64_t k = 0; k < hidden; k++)
            panels[(column / PANEL * hidden + k) * PANEL + column % PANEL] = column < count ? h[column * hidden + k] : 0;
    return columns;
}

/* --- forward: parts are tokens ------------------------------------------------------------------------------------- */

static void output_block(const void *given, int64_t index, float *room) {
    const Output *o = given;
    int64_t first = index * SIDE, count = smaller(SIDE, o->tokens - first);
    float *panels = room, *logits = panels + SIDE * o->hidden, most[SIDE];
    double totals[SIDE] = {0};
    int64_t columns = side_by_side(o->h + first * o->hidden, count, o->hidden, panels);
    for (int64_t i = 0; i < SIDE; i++) most[i] = -INFINITY;
    for (int64_t v = 0; v < o->vocab; v += SOME_LOGITS) {
        int64_t rows = smaller(SOME_LOGITS, o->vocab - v);
        product(rows, o->head + v * o->hidden, o->hidden, panels, NULL, logits, columns, STORE);
        for (int64_t column = 0; column < columns; column += LANES) {
            vec before = *(vec *)(most + column), largest = before, total = splat(0);
            for (int64_t row = 0; row < rows; row++) {
                vec *some = (vec *)(logits + row * columns + column);
                *some = *some / o->temperature;
                largest = larger(largest, *some);
            }
            for (int64_t row = 0; row < rows; row++) total += exp_of(*(vec *)(logits + row * columns + column) - largest);
            vec shrunk = exp_of(before - largest);
            for (int lane = 0; lane < LANES; lane++)
                totals[column + lane] = totals[column + lane] * shrunk[lane] + total[lane];
            *(vec *)(most + column) = largest;
        }
        for (int64_t i = 0; i < count; i++) {
            int64_t row = o->targets[first + i] - v;
            if (row >= 0 && row < rows) o->logprobs[first + i] = logits[row * columns + i];
        }
    }
    for (int64_t i = 0; i < count; i++) {
        o->normalisers[first + i] = most[i] + (float)log(totals[i]);
        o->logprobs[first + i] -= o->normalisers[first + i];
    }
}

int output_forward(const Output *o, int64_t num_threads) {
    int64_t room = SIDE * o->hidden + SOME_LOGITS * SIDE;
    return in_parallel((Job){output_block, o, (o->tokens + SIDE - 1) / SIDE, room, 0, 0}, num_threads);
}

/* --- backward: parts are tokens of the vocabulary ------------------------------------------------------------------ */

typedef struct {
    const Output *o;
    int64_t first, count, columns, each; /* tokens that are worked on together; how much of the vocabulary is a part */
    const float *panels;
    float *dh; /* [part token hidden] */
} Some;

static void output_block_back(const void *given, int64_t index, float *room) {
    const Some *s = given;
    const Output *o = s->o;
    int64_t hidden = o->hidden, columns = s->columns, end = smaller(o->vocab, (index + 1) * s->each);
    float *slope = room, *dh = s->dh + index * TOGETHER * hidden;
    memset(dh, 0, 4 * s->count * hidden);
    for (int64_t v = index * s->each; v < end; v += SOME_LOGITS) {
        int64_t rows = smaller(SOME_LOGITS, end - v);
        product(rows, o->head + v * hidden, hidden, s->panels, NULL, slope, columns, STORE);
        for (int64_t column = 0; column < s->count; column += LANES) {
            float grads[LANES] = {0}, normalisers[LANES] = {0};
            for (int64_t i = 0; i < smaller(LANES, s->count - column); i++) {
                grads[i] = o->grad[s->first + column + i] / o->temperature;
                normalisers[i] = o->normalisers[s->first + column + i];
            }
            for (int64_t row = 0; row < rows; row++) {
                vec *some = (vec *)(slope + row * columns + column);
                *some = -*(vec *)grads * exp_of(*some / o->temperature - *(vec *)normalisers);
            }
        }
        for (int64_t i = 0; i < s->count; i++) {
            int64_t row = o->targets[s->first + i] - v;
            if (row >= 0 && row < rows) slope[row * columns + i] += o->grad[s->first + i] / o->temperature;
        }
        multiply(s->count, rows, hidden, (Left){slope, 1, columns}, o->head + v * hidden, hidden, dh, hidden, ADD);
        if (o->dw)
            multiply(rows, s->count, hidden, (Left){slope, columns, 1}, o->h + s->first * hidden, hidden,
                     o->dw + v * hidden, hidden, ADD);
    }
}

int output_backward(const Output *o, int64_t num_threads) {
    int64_t hidden = o->hidden, each = padded_to((o->vocab + MOST_PARTS - 1) / MOST_PARTS, SOME_LOGITS / 2);
    int64_t parts = (o->vocab + each - 1) / each;
    float *panels = malloc(4 * TOGETHER * hidden * (1 + parts));
    int failed = !panels;
    for (int64_t first = 0; !failed && first < o->tokens; first += TOGETHER) {
        int64_t count = smaller(TOGETHER, o->tokens - first);
        int64_t columns = side_by_side(o->h + first * hidden, count, hidden, panels);
        Some some = {o, first, count, columns, each, panels, panels + TOGETHER * hidden};
        failed = in_parallel((Job){output_block_back, &some, parts, SOME_LOGITS * TOGETHER, 0, 0}, num_threads);
        float *dh = o->dh + first * hidden;
        memset(dh, 0, 4 * count * hidden);
        for (int64_t part = 0; part < parts; part++)
            for (int64_t i = 0; i < count * hidden; i++) dh[i] += some.dh[part * TOGETHER * hidden + i];
    }
    free(panels);
    return failed;
}
