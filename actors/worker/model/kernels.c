/* One decode step of a layer's half per call, for float32 on x86-64 CPUs with AVX2 (see kernels.py for who calls what).
 *
 * Decoding is bound by reading weights: a step of few tokens should take as long as memory needs for them, whatever the
 * number of tokens. So a product keeps four weight rows in flight and uses each value for all tokens while it is in the
 * first-level cache, and what lies between two products (convolution, delta rule, attention, norms) runs inside the
 * same parallel region instead of as dozens of small kernels.
 *
 * Conventions. All matrices are row-major and contiguous. "Token" t of the flat batch is token t % width of row
 * t / width; a row is one sequence. Padding tokens (index >= counts[row]) are computed but never written to KEY or
 * VALUE. The functions allocate nothing: the caller hands in scratch of as many floats as *_scratch says. NaN and
 * infinity propagate. Thread safety: calls with different scratch, caches and outputs are independent.
 */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;
typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define TILE 64 /* context positions whose scores are kept at a time */

typedef struct {
    i64 threads, rows, width;
    const i64 *slots, *lives;   /* [rows]: state slot, and the checkpoint that the state stands at */
    const i64 *starts, *counts; /* [rows]: position of the first token; how many are no padding */
    const i64 *blocks;          /* [rows, block_stride]: block tables */
    i64 block_stride, block_size;
    const float *rotations; /* [tokens, rotary_dim]: cosine and sine of each pair */
    float *scratch;
} Step;

typedef struct {
    i64 hidden, inner;
    const float *norm; /* [hidden], or NULL when folded into the matrix behind it */
    const float *gate_up, *down;
    float eps;
} Mlp;

typedef struct {
    i64 hidden, query_heads, kv_heads, head_dim, rotary_dim;
    const float *norm, *projection, *head_norm, *output;
    float *key, *value; /* [block_count * block_size, kv_heads * head_dim] */
    float eps;
} Attention;

typedef struct {
    i64 hidden, key_heads, value_heads, key_dim, value_dim;
    i64 taps, columns, checkpoints; /* kernel size; CONV rows and SSM rows per slot */
    const float *norm, *projection, *kernel, *decay, *dt_bias, *gated_norm, *output;
    float *conv, *ssm; /* [slots * columns, channels]; [slots * checkpoints, value_heads, key_dim, value_dim] */
    float eps, unit_eps, output_eps;
} Delta;

/* -- products ------------------------------------------------------------------------------------------------------ */

INLINE float sum8(v8 x) { return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])); }

INLINE v8 load(const float *p) { return *(const v8 *)p; }

INLINE float dot(const float *a, const float *b, i64 n) {
    v8 sum = {0};
    i64 k = 0;
    for (; k + 8 <= n; k += 8) sum += load(a + k) * load(b + k);
    float rest = 0;
    for (; k < n; k++) rest += a[k] * b[k];
    return sum8(sum) + rest;
}

/* y += a * x */
INLINE void axpy(float *y, float a, const float *x, i64 n) {
    i64 d = 0;
    for (; d + 8 <= n; d += 8) *(v8 *)(y + d) += a * load(x + d);
    for (; d < n; d++) y[d] += a * x[d];
}

/* Products of four weight rows with `count` (1 or 2) tokens, written to y[token * y_stride + 0..3]. Meanwhile rows
 * [from, to) of the four behind them are fetched. */
INLINE void four_rows(const float *w, const float *x, i64 in, int count, float *y, i64 y_stride, i64 from, i64 to) {
    v8 sums[2][4] = {{{0}}};
    const float *ahead = w + 4 * in;
    i64 k = 0;
    for (; k + 16 <= in; k += 16) {
        for (int half = 0; half < 16; half += 8) {
            v8 first = load(x + k + half), second = count == 2 ? load(x + in + k + half) : first;
            for (int r = 0; r < 4; r++) {
                v8 row = load(w + r * in + k + half);
                sums[0][r] += row * first;
                if (count == 2) sums[1][r] += row * second;
            }
        }
        for (i64 r = from; r < to; r++) __builtin_prefetch(ahead + r * in + k, 0, 3);
    }
    for (int t = 0; t < count; t++)
        for (int r = 0; r < 4; r++) {
            float rest = 0;
            for (i64 j = k; j < in; j++) rest += w[r * in + j] * x[t * in + j];
            y[t * y_stride + r] = sum8(sums[t][r]) + rest;
        }
}

/* This thread's share of y [tokens, out] = x [tokens, in] · w [out, in]ᵀ; call from all threads of a region. */
INLINE void product(const float *x, i64 tokens, i64 in, const float *w, i64 out, float *y) {
    i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
    i64 groups = (out + 3) / 4;
    i64 begin = groups * thread / threads * 4, end = groups * (thread + 1) / threads * 4;
    if (end > out) end = out;
    i64 share = tokens >= 8 ? 1 : tokens >= 4 ? 2 : 4; /* rows ahead that each pair of tokens fetches */
    i64 o = begin;
    for (; o + 4 <= end; o += 4) {
        const float *rows = w + o * in;
        i64 t = 0;
        for (; t + 2 <= tokens; t += 2) {
            i64 from = t / 2 * share, to = from + share;
            four_rows(rows, x + t * in, in, 2, y + t * out + o, out, from < 4 ? from : 4, to < 4 ? to : 4);
        }
        if (t < tokens) four_rows(rows, x + t * in, in, 1, y + t * out + o, out, tokens == 1 ? 0 : 4, 4);
    }
    for (; o < end; o++)
        for (i64 t = 0; t < tokens; t++) y[t * out + o] = dot(w + o * in, x + t * in, in);
}

/* -- small pieces -------------------------------------------------------------------------------------------------- */

INLINE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* y = x / sqrt(mean(x²) + eps) * weight */
INLINE void rms_norm(const float *x, const float *weight, float eps, i64 n, float *y) {
    float scale = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
    for (i64 d = 0; d < n; d++) y[d] = x[d] * scale;
    if (weight)
        for (i64 d = 0; d < n; d++) y[d] *= weight[d];
}

/* Every thread's share of the norms of all tokens; ends with a barrier. */
INLINE void norm_all(const float *x, i64 tokens, i64 hidden, const float *weight, float eps, float *y) {
#pragma omp for schedule(static)
    for (i64 t = 0; t < tokens; t++) rms_norm(x + t * hidden, weight, eps, hidden, y + t * hidden);
}

/* -- a product alone ----------------------------------------------------------------------------------------------- */

/* y [tokens, out] = x [tokens, in] · w [out, in]ᵀ */
void kvferry_linear(const float *x, const float *w, float *y, i64 tokens, i64 in, i64 out, i64 threads) {
#pragma omp parallel num_threads((int)threads)
    product(x, tokens, in, w, out, y);
}

/* -- MLP ----------------------------------------------------------------------------------------------------------- */

i64 kvferry_mlp_scratch(const Mlp *layer, const Step *step) {
    return step->rows * step->width * (layer->hidden + 3 * layer->inner);
}

/* y [tokens, hidden] = down(silu(gate) * up) of the normed x: this rank's part. */
void kvferry_mlp(const Mlp *layer, const Step *step, const float *x, float *y) {
    i64 tokens = step->rows * step->width, hidden = layer->hidden, inner = layer->inner;
    float *normed = step->scratch, *both = normed + tokens * hidden, *active = both + tokens * 2 * inner;
#pragma omp parallel num_threads((int)step->threads)
    {
        norm_all(x, tokens, hidden, layer->norm, layer->eps, normed);
        product(normed, tokens, hidden, layer->gate_up, 2 * inner, both);
#pragma omp barrier
#pragma omp for schedule(static) collapse(2)
        for (i64 t = 0; t < tokens; t++)
            for (i64 d = 0; d < inner; d++) {
                float gate = both[t * 2 * inner + d];
                active[t * inner + d] = gate * sigmoid(gate) * both[t * 2 * inner + inner + d];
            }
        product(active, tokens, inner, layer->down, hidden, y);
    }
}

/* -- attention ----------------------------------------------------------------------------------------------------- */

INLINE i64 projected_width(const Attention *layer) {
    return (2 * layer->query_heads + 2 * layer->kv_heads) * layer->head_dim;
}

INLINE i64 attend_scratch(const Attention *layer, const Step *step) { /* per thread */
    i64 queries = step->width * (layer->query_heads / layer->kv_heads);
    return queries * (TILE + 2 + layer->head_dim);
}

i64 kvferry_attention_scratch(const Attention *layer, const Step *step) {
    i64 per_token = layer->hidden + projected_width(layer) + layer->query_heads * layer->head_dim;
    return step->rows * step->width * per_token + step->threads * attend_scratch(layer, step);
}

/* Norm and rotation of one query or key head, in place. */
INLINE void place_head(float *head, const float *weight, const float *rotation, const Attention *layer) {
    rms_norm(head, weight, layer->eps, layer->head_dim, head);
    for (i64 d = 0; d < layer->rotary_dim; d += 2) {
        float cosine = rotation[d], sine = rotation[d + 1], real = head[d], imaginary = head[d + 1];
        head[d] = real * cosine - imaginary * sine;
        head[d + 1] = real * sine + imaginary * cosine;
    }
}

INLINE i64 cache_row(const Step *step, i64 row, i64 position) {
    i64 block = step->blocks[row * step->block_stride + position / step->block_size];
    return block * step->block_size + position % step->block_size;
}

/* All query heads of one KV head of one row over its context, tile by tile with a running maximum. */
INLINE void attend(const Attention *layer, const Step *step, const float *projected, i64 row, i64 head, float *out,
                   float *scratch) {
    i64 dim = layer->head_dim, group = layer->query_heads / layer->kv_heads, queries = step->width * group;
    i64 in_width = projected_width(layer), out_width = layer->query_heads * dim, kv_width = layer->kv_heads * dim;
    i64 start = step->starts[row], length = start + step->counts[row];
    float *scores = scratch, *maxima = scores + queries * TILE, *totals = maxima + queries, *sums = totals + queries;
    float scale = 1.0f / sqrtf((float)dim);
    for (i64 q = 0; q < queries; q++) maxima[q] = -INFINITY;
    memset(totals, 0, sizeof(float) * (size_t)(queries * (1 + dim))); /* and sums behind it */
    for (i64 begin = 0; begin < length; begin += TILE) {
        i64 size = length - begin < TILE ? length - begin : TILE;
        for (i64 j = 0; j < size; j++) {
            const float *key = layer->key + cache_row(step, row, begin + j) * kv_width + head * dim;
            for (i64 q = 0; q < queries; q++) {
                const float *query = projected + (row * step->width + q / group) * in_width + (head * group + q % group) * dim;
                scores[q * TILE + j] = dot(query, key, dim) * scale;
            }
        }
        for (i64 q = 0; q < queries; q++) {
            i64 seen = start + q / group + 1 - begin; /* causal: how many of this tile this query may see */
            if (seen > size) seen = size;
            float *own = scores + q * TILE, maximum = maxima[q];
            for (i64 j = 0; j < seen; j++)
                if (!(own[j] <= maximum)) maximum = own[j]; /* NaN wins, so that it is seen */
            if (seen > 0) {
                float factor = expf(maxima[q] - maximum), total = totals[q] * factor;
                for (i64 d = 0; d < dim; d++) sums[q * dim + d] *= factor;
                for (i64 j = 0; j < seen; j++) total += own[j] = expf(own[j] - maximum);
                totals[q] = total;
                maxima[q] = maximum;
            }
            for (i64 j = seen > 0 ? seen : 0; j < size; j++) own[j] = 0;
        }
        for (i64 j = 0; j < size; j++) {
            const float *value = layer->value + cache_row(step, row, begin + j) * kv_width + head * dim;
            for (i64 q = 0; q < queries; q++)
                if (scores[q * TILE + j] != 0) axpy(sums + q * dim, scores[q * TILE + j], value, dim);
        }
    }
    for (i64 q = 0; q < queries; q++) {
        i64 token = row * step->width + q / group, place = (head * group + q % group) * dim;
        const float *gate = projected + token * in_width + (layer->query_heads + layer->kv_heads) * dim + place;
        for (i64 d = 0; d < dim; d++) out[token * out_width + place + d] = sums[q * dim + d] / totals[q] * sigmoid(gate[d]);
    }
}

/* y [tokens, hidden] = gated attention of the normed x: this rank's part; writes KEY and VALUE of all real tokens. */
void kvferry_attention(const Attention *layer, const Step *step, const float *x, float *y) {
    i64 tokens = step->rows * step->width, hidden = layer->hidden, dim = layer->head_dim;
    i64 in_width = projected_width(layer), out_width = layer->query_heads * dim, kv_width = layer->kv_heads * dim;
    i64 turned = layer->query_heads + layer->kv_heads;
    float *normed = step->scratch, *projected = normed + tokens * hidden, *mixed = projected + tokens * in_width;
    float *tiles = mixed + tokens * out_width;
#pragma omp parallel num_threads((int)step->threads)
    {
        norm_all(x, tokens, hidden, layer->norm, layer->eps, normed);
        product(normed, tokens, hidden, layer->projection, in_width, projected);
#pragma omp barrier
#pragma omp for schedule(static) collapse(2)
        for (i64 t = 0; t < tokens; t++)
            for (i64 h = 0; h < turned; h++) {
                float *head = projected + t * in_width + h * dim;
                place_head(head, layer->head_norm + h * dim, step->rotations + t * layer->rotary_dim, layer);
                i64 row = t / step->width, index = t % step->width, kv_head = h - layer->query_heads;
                if (kv_head < 0 || index >= step->counts[row]) continue;
                i64 place = cache_row(step, row, step->starts[row] + index) * kv_width + kv_head * dim;
                memcpy(layer->key + place, head, sizeof(float) * (size_t)dim);
                const float *value = projected + t * in_width + in_width - kv_width + kv_head * dim;
                memcpy(layer->value + place, value, sizeof(float) * (size_t)dim);
            }
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (i64 row = 0; row < step->rows; row++)
            for (i64 head = 0; head < layer->kv_heads; head++)
                attend(layer, step, projected, row, head, mixed, tiles + omp_get_thread_num() * attend_scratch(layer, step));
        product(mixed, tokens, out_width, layer->output, hidden, y);
    }
}

/* -- gated delta-net ----------------------------------------------------------------------------------------------- */

INLINE i64 channel_count(const Delta *layer) {
    return 2 * layer->key_heads * layer->key_dim + layer->value_heads * layer->value_dim;
}

INLINE i64 delta_width(const Delta *layer) {
    return channel_count(layer) + layer->value_heads * (layer->value_dim + 2);
}

INLINE i64 rule_scratch(const Delta *layer) { return 2 * layer->key_dim + 2 * layer->value_dim; } /* per thread */

i64 kvferry_delta_scratch(const Delta *layer, const Step *step) {
    i64 tokens = step->rows * step->width, channels = channel_count(layer);
    i64 per_token = layer->hidden + delta_width(layer) + channels + layer->value_heads * layer->value_dim;
    i64 windows = step->rows * (layer->taps - 1 + step->width) * channels;
    return tokens * per_token + windows + step->threads * rule_scratch(layer);
}

/* Channels [begin, end) of one row: silu of the causal convolution for its tokens; moves the slot's window on. */
INLINE void convolve(const Delta *layer, const Step *step, i64 row, i64 begin, i64 end, const float *packed, float *window,
                     float *out) {
    i64 channels = channel_count(layer), in_width = delta_width(layer), taps = layer->taps, width = step->width;
    size_t bytes = sizeof(float) * (size_t)(end - begin);
    float *cache = layer->conv + step->slots[row] * layer->columns * channels + begin;
    for (i64 k = 0; k < taps - 1; k++)
        memcpy(window + k * channels + begin, cache + (step->lives[row] + k) * channels, bytes);
    for (i64 t = 0; t < width; t++)
        memcpy(window + (taps - 1 + t) * channels + begin, packed + (row * width + t) * in_width + begin, bytes);
    for (i64 k = 0; k < taps - 2 + width; k++)
        memcpy(cache + k * channels, window + (k + 1) * channels + begin, bytes);
    for (i64 t = 0; t < width; t++) {
        float *own = out + (row * width + t) * channels;
        for (i64 c = begin; c < end; c++) own[c] = window[t * channels + c] * layer->kernel[c];
        for (i64 k = 1; k < taps; k++)
            for (i64 c = begin; c < end; c++) own[c] += window[(t + k) * channels + c] * layer->kernel[k * channels + c];
        for (i64 c = begin; c < end; c++) own[c] *= sigmoid(own[c]);
    }
}

/* unit = x / sqrt(sum(x²) + eps) */
INLINE void normalise(const float *x, float eps, i64 n, float *unit) {
    float scale = 1.0f / sqrtf(dot(x, x, n) + eps);
    for (i64 d = 0; d < n; d++) unit[d] = x[d] * scale;
}

/* One value head of one row: the delta rule token by token, each state to its own checkpoint, then the gated norm. */
INLINE void rule(const Delta *layer, const Step *step, i64 row, i64 head, const float *packed, const float *convolved,
                 float *out, float *scratch) {
    i64 dk = layer->key_dim, dv = layer->value_dim, channels = channel_count(layer), in_width = delta_width(layer);
    i64 key_head = head / (layer->value_heads / layer->key_heads), out_width = layer->value_heads * dv;
    i64 base = step->slots[row] * layer->checkpoints;
    float *query = scratch, *key = query + dk, *fresh = key + dk, *mixed = fresh + dv;
    const float *state = layer->ssm + ((base + step->lives[row]) * layer->value_heads + head) * dk * dv;
    for (i64 t = 0; t < step->width; t++) {
        i64 token = row * step->width + t;
        const float *in = packed + token * in_width + channels, *own = convolved + token * channels;
        const float *value = own + 2 * layer->key_heads * dk + head * dv, *gate = in + head * dv;
        float beta = sigmoid(in[out_width + head]);
        float decay = expf(softplus(in[out_width + layer->value_heads + head] + layer->dt_bias[head]) * layer->decay[head]);
        normalise(own + key_head * dk, layer->unit_eps, dk, query);
        normalise(own + (layer->key_heads + key_head) * dk, layer->unit_eps, dk, key);
        memset(fresh, 0, sizeof(float) * (size_t)(2 * dv)); /* and mixed behind it */
        for (i64 i = 0; i < dk; i++) {
            axpy(fresh, key[i], state + i * dv, dv);
            axpy(mixed, query[i], state + i * dv, dv);
        }
        float overlap = dot(query, key, dk);
        for (i64 d = 0; d < dv; d++) fresh[d] = (value[d] - decay * fresh[d]) * beta;
        for (i64 d = 0; d < dv; d++) mixed[d] = decay * mixed[d] + overlap * fresh[d];
        float *next = layer->ssm + ((base + t) * layer->value_heads + head) * dk * dv;
        for (i64 i = 0; i < dk; i++) {
            const float *from = state + i * dv;
            float *to = next + i * dv;
            for (i64 d = 0; d < dv; d++) to[d] = decay * from[d] + key[i] * fresh[d];
        }
        state = next;
        float *target = out + token * out_width + head * dv;
        rms_norm(mixed, layer->gated_norm, layer->output_eps, dv, target);
        for (i64 d = 0; d < dv; d++) target[d] *= gate[d] * sigmoid(gate[d]);
    }
}

/* y [tokens, hidden] = the gated delta-net of the normed x: this rank's part; advances CONV and SSM of each row. */
void kvferry_delta(const Delta *layer, const Step *step, const float *x, float *y) {
    i64 rows = step->rows, tokens = rows * step->width, hidden = layer->hidden;
    i64 channels = channel_count(layer), in_width = delta_width(layer), out_width = layer->value_heads * layer->value_dim;
    i64 window_rows = layer->taps - 1 + step->width;
    float *normed = step->scratch, *packed = normed + tokens * hidden, *windows = packed + tokens * in_width;
    float *convolved = windows + rows * window_rows * channels, *mixed = convolved + tokens * channels;
    float *locals = mixed + tokens * out_width;
#pragma omp parallel num_threads((int)step->threads)
    {
        i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        norm_all(x, tokens, hidden, layer->norm, layer->eps, normed);
        product(normed, tokens, hidden, layer->projection, in_width, packed);
#pragma omp barrier
        for (i64 row = 0; row < rows; row++)
            convolve(layer, step, row, channels * thread / threads, channels * (thread + 1) / threads, packed,
                     windows + row * window_rows * channels, convolved);
#pragma omp barrier
#pragma omp for schedule(static) collapse(2)
        for (i64 row = 0; row < rows; row++)
            for (i64 head = 0; head < layer->value_heads; head++)
                rule(layer, step, row, head, packed, convolved, mixed, locals + thread * rule_scratch(layer));
        product(mixed, tokens, out_width, layer->output, hidden, y);
    }
}
