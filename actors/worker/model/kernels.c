/* A decode step through layers, half by half, for float32 on x86-64 CPUs with AVX2 (see kernels.py for who calls what).
 *
 * Decoding is bound by reading weights: a step of few tokens should take as long as memory needs for them, whatever the
 * number of tokens. So a product keeps four weight rows in flight and uses each value for all tokens while it is in the
 * first-level cache, and what lies between two products (convolution, delta rule, attention, norms) runs inside the
 * same parallel region instead of as dozens of small kernels.
 *
 * Conventions. All matrices are row-major and contiguous. "Token" t of the flat batch is token t % width of row
 * t / width; a row is one sequence. Padding tokens (index >= counts[row]) are computed but never written to KEY or
 * VALUE. Weights are float32, or bfloat16 where that loses nothing: they are widened on their way to a register, and all
 * arithmetic is in float32. The functions allocate nothing: the caller hands in scratch of as many floats as *_scratch
 * says. NaN and infinity propagate. Thread safety: calls with different scratch, caches and outputs are independent.
 */

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;
typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define SHARE 16 /* groups of four rows of a matrix that a thread takes at a time */
#define TILE 64  /* context positions whose scores are kept at a time */
#define AHEAD 12 /* rows of KEY or of a state from the one in use to the one fetched: too short for the hardware */

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
    const void *values; /* [out, in] */
    i64 narrow;         /* 1: bfloat16, 0: float32 */
} Matrix;

typedef struct {
    i64 hidden, inner;
    const float *norm; /* [hidden], or NULL when folded into the matrix behind it */
    Matrix gate_up, down;
    float eps;
} Mlp;

typedef struct {
    i64 hidden, query_heads, kv_heads, head_dim, rotary_dim;
    const float *norm, *head_norm;
    Matrix projection, output;
    float *key, *value; /* [block_count * block_size, kv_heads * head_dim] */
    float eps;
} Attention;

typedef struct {
    i64 hidden, key_heads, value_heads, key_dim, value_dim;
    i64 taps, columns, checkpoints; /* kernel size; CONV rows and SSM rows per slot */
    const float *norm, *kernel, *decay, *dt_bias, *gated_norm;
    Matrix projection, output;
    float *conv, *ssm; /* [slots * columns, channels]; [slots * checkpoints, value_heads, key_dim, value_dim] */
    float eps, unit_eps, output_eps;
} Delta;

/* -- products ------------------------------------------------------------------------------------------------------ */

INLINE v8 load(const float *p) { return *(const v8 *)p; }

/* Weights from number k of a row on. A bfloat16 is the upper half of the float32 of the same value. */
INLINE v8 load_weights(const void *row, i64 k, int narrow) {
    if (!narrow) return load((const float *)row + k);
    __m256i halves = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)((const uint16_t *)row + k)));
    return (v8)_mm256_slli_epi32(halves, 16);
}

INLINE float load_weight(const void *row, i64 k, int narrow) {
    if (!narrow) return ((const float *)row)[k];
    union {
        uint32_t bits;
        float value;
    } wide = {(uint32_t)((const uint16_t *)row)[k] << 16};
    return wide.value;
}

/* The sums of four vectors. */
INLINE __m128 sums4(v8 a, v8 b, v8 c, v8 d) {
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
    return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

INLINE float dot(const float *a, const float *b, i64 n) {
    v8 sum = {0};
    i64 k = 0;
    for (; k + 8 <= n; k += 8) sum += load(a + k) * load(b + k);
    float rest = 0;
    for (; k < n; k++) rest += a[k] * b[k];
    return _mm_cvtss_f32(sums4(sum, sum, sum, sum)) + rest;
}

/* Products of four rows w[0..3] with `count` (1 to 3, a constant) vectors x, x + x_stride, …, all of length n:
 * y[t * y_stride + 0..3]. Meanwhile `share` / 64 cache lines for every 16 values are fetched from `ahead` on, one
 * behind the other: memory never waits for arithmetic. */
INLINE void four_rows(const void *const w[4], int narrow, const float *x, i64 x_stride, i64 n, int count, float *y,
                      i64 y_stride, const char *ahead, i64 share) {
    v8 sums[3][4];
    for (int t = 0; t < count; t++)
        for (int r = 0; r < 4; r++) sums[t][r] = (v8){0};
    i64 k = 0, due = 0, fetched = 0;
    for (; k + 16 <= n; k += 16) {
        for (i64 half = k; half < k + 16; half += 8) {
            v8 first = load(x + half), second = first, third = first;
            if (count > 1) second = load(x + x_stride + half);
            if (count > 2) third = load(x + 2 * x_stride + half);
            for (int r = 0; r < 4; r++) {
                v8 row = load_weights(w[r], half, narrow);
                sums[0][r] += row * first;
                if (count > 1) sums[1][r] += row * second;
                if (count > 2) sums[2][r] += row * third;
            }
        }
        for (due += share; fetched < due / 64; fetched++) __builtin_prefetch(ahead + fetched * 64, 0, 3);
    }
    for (int t = 0; t < count; t++) {
        _mm_storeu_ps(y + t * y_stride, sums4(sums[t][0], sums[t][1], sums[t][2], sums[t][3]));
        for (i64 j = k; j < n; j++)
            for (int r = 0; r < 4; r++) y[t * y_stride + r] += load_weight(w[r], j, narrow) * x[t * x_stride + j];
    }
}

/* The same for any number of vectors, three at a time. The passes share the fetching of the four rows at `ahead` (or
 * NULL) evenly. */
INLINE void four_rows_all(const void *const w[4], int narrow, const float *x, i64 x_stride, i64 n, i64 vectors,
                          float *y, i64 y_stride, const void *ahead) {
    i64 passes = (vectors + 2) / 3, lines = narrow ? 2 : 4; /* in 16 values of four rows */
    i64 share = ahead ? (lines * 64 + passes - 1) / passes : 0;
    for (i64 t = 0; t < vectors; t += 3) {
        const float *own = x + t * x_stride;
        const char *next = ahead ? (const char *)ahead + t / 3 * (n / 16 * share / 64) * 64 : NULL;
        float *out = y + t * y_stride;
        if (vectors - t >= 3)
            four_rows(w, narrow, own, x_stride, n, 3, out, y_stride, next, share);
        else if (vectors - t == 2)
            four_rows(w, narrow, own, x_stride, n, 2, out, y_stride, next, share);
        else
            four_rows(w, narrow, own, x_stride, n, 1, out, y_stride, next, share);
    }
}

/* Rows [begin, begin + 4) of a product, or as many as there are. */
INLINE void product_rows(const float *x, i64 tokens, i64 in, const char *values, int narrow, i64 begin, i64 out,
                         float *y) {
    i64 stride = in * (narrow ? 2 : 4);
    const char *first = values + begin * stride;
    const void *const rows[4] = {first, first + stride, first + 2 * stride, first + 3 * stride};
    if (begin + 4 <= out) {
        four_rows_all(rows, narrow, x, in, in, tokens, y + begin, out, first + 4 * stride);
        return;
    }
    for (i64 last = begin; last < out; last++)
        for (i64 t = 0; t < tokens; t++) {
            float sum = 0;
            for (i64 k = 0; k < in; k++) sum += load_weight(rows[last - begin], k, narrow) * x[t * in + k];
            y[t * out + last] = sum;
        }
}

/* y [tokens, out] = x [tokens, in] · w [out, in]ᵀ, shared by all threads of a region, which all call it; no barrier at
 * the end. Threads take rows as they come: one that has lost its core to another process holds up nobody else. */
INLINE void product(const float *x, i64 tokens, i64 in, Matrix w, i64 out, float *y) {
#pragma omp for schedule(dynamic, SHARE) nowait
    for (i64 begin = 0; begin < out; begin += 4) {
        if (w.narrow)
            product_rows(x, tokens, in, w.values, 1, begin, out, y);
        else
            product_rows(x, tokens, in, w.values, 0, begin, out, y);
    }
}

/* -- small pieces -------------------------------------------------------------------------------------------------- */

/* exp(x) to about one unit in the last place; below -87 it stops at exp(-87), above 88 at exp(88). NaN stays NaN: the
 * processor's minimum and maximum give their second operand then. */
INLINE v8 exp8(v8 x) {
    __m256 bounded = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(_mm256_set1_ps(-87.0f), (__m256)x));
    v8 n = (v8)_mm256_round_ps(_mm256_mul_ps(bounded, _mm256_set1_ps(1.44269504f)), 8); /* to nearest */
    v8 r = (v8)bounded - n * 0.693359375f + n * 2.12194440e-4f;                        /* x - n ln 2, in two parts */
    v8 p = ((((1.9875691e-4f * r + 1.3981999e-3f) * r + 8.3334519e-3f) * r + 4.1665796e-2f) * r + 1.6666665e-1f) * r;
    p = (p + 5.0000001e-1f) * (r * r) + r + 1.0f;
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32((__m256)n), _mm256_set1_epi32(127)), 23);
    return p * (v8)_mm256_castsi256_ps(power);
}

INLINE v8 sigmoid8(v8 x) { return 1.0f / (1.0f + exp8(-x)); }

INLINE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/* y = x * sigmoid(x) * factor (or * 1 when factor is NULL) */
INLINE void silu(const float *x, const float *factor, i64 n, float *y) {
    i64 d = 0;
    for (; d + 8 <= n; d += 8) {
        v8 value = load(x + d) * sigmoid8(load(x + d));
        if (factor) value *= load(factor + d);
        *(v8 *)(y + d) = value;
    }
    for (; d < n; d++) y[d] = x[d] * sigmoid(x[d]) * (factor ? factor[d] : 1.0f);
}

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

/* Raised whenever a structure or a function below takes another form: kernels.py calls no other. */
i64 kvferry_interface(void) { return 2; }

/* -- a product alone ----------------------------------------------------------------------------------------------- */

/* y [tokens, out] = x [tokens, in] · w [out, in]ᵀ */
void kvferry_linear(const float *x, const Matrix *w, float *y, i64 tokens, i64 in, i64 out, i64 threads) {
#pragma omp parallel num_threads((int)threads)
    product(x, tokens, in, *w, out, y);
}

/* -- MLP ----------------------------------------------------------------------------------------------------------- */

static i64 mlp_scratch(const Mlp *layer, const Step *step) {
    return step->rows * step->width * (layer->hidden + 3 * layer->inner);
}

/* y [tokens, hidden] = down(silu(gate) * up) of the normed x: this rank's part. */
static void mlp(const Mlp *layer, const Step *step, const float *x, float *y) {
    i64 tokens = step->rows * step->width, hidden = layer->hidden, inner = layer->inner;
    float *normed = step->scratch, *both = normed + tokens * hidden, *active = both + tokens * 2 * inner;
#pragma omp parallel num_threads((int)step->threads)
    {
        norm_all(x, tokens, hidden, layer->norm, layer->eps, normed);
        product(normed, tokens, hidden, layer->gate_up, 2 * inner, both);
#pragma omp barrier
        i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        i64 begin = inner * thread / threads, end = inner * (thread + 1) / threads;
        for (i64 t = 0; t < tokens; t++) {
            const float *gate = both + t * 2 * inner;
            silu(gate + begin, gate + inner + begin, end - begin, active + t * inner + begin);
        }
#pragma omp barrier
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

static i64 attention_scratch(const Attention *layer, const Step *step) {
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

/* sums += the weighted sum of `count` (1 to 4) rows of length n */
INLINE void add_rows(float *sums, const float *weights, const float *const rows[4], i64 count, i64 n) {
    i64 d = 0;
    if (count == 4)
        for (; d + 8 <= n; d += 8)
            *(v8 *)(sums + d) = load(sums + d) + (weights[0] * load(rows[0] + d) + weights[1] * load(rows[1] + d)) +
                                (weights[2] * load(rows[2] + d) + weights[3] * load(rows[3] + d));
    for (; d < n; d++)
        for (i64 r = 0; r < count; r++) sums[d] += weights[r] * rows[r][d];
}

INLINE void fetch(const float *row, i64 n) {
    for (i64 d = 0; d < n; d += 16) __builtin_prefetch(row + d, 0, 3);
}

/* Up to four rows of a tile from `first` on; beyond its end the last one again. */
INLINE void pick_rows(const float *base, const i64 *places, i64 first, i64 size, const float *rows[4]) {
    for (i64 r = 0; r < 4; r++) rows[r] = base + places[first + r < size ? first + r : size - 1];
}

/* Raw scores of one query's `seen` positions of a tile become weights; what was summed before them is brought to the
 * new maximum. A score that is not a number makes the total, and so the output, not a number. */
INLINE void weigh(float *scores, i64 seen, float scale, float *maximum, float *total, float *sums, i64 dim) {
    for (i64 j = seen; j % 8; j++) scores[j] = -INFINITY;
    __m256 highest = _mm256_set1_ps(-INFINITY);
    for (i64 j = 0; j < seen; j += 8) {
        v8 scaled = load(scores + j) * scale;
        *(v8 *)(scores + j) = scaled;
        highest = _mm256_max_ps(highest, (__m256)scaled);
    }
    float new_maximum = *maximum;
    for (int d = 0; d < 8; d++)
        if (((v8)highest)[d] > new_maximum) new_maximum = ((v8)highest)[d];
    if (new_maximum > *maximum) {
        float factor = expf(*maximum - new_maximum);
        *total *= factor;
        for (i64 d = 0; d < dim; d++) sums[d] *= factor;
        *maximum = new_maximum;
    }
    v8 sum = {0};
    for (i64 j = 0; j < seen; j += 8) {
        v8 weights = exp8(load(scores + j) - new_maximum);
        *(v8 *)(scores + j) = weights;
        sum += weights;
    }
    *total += _mm_cvtss_f32(sums4(sum, sum, sum, sum));
}

/* All query heads of one KV head of one row over its context, tile by tile with a running maximum. */
INLINE void attend(const Attention *layer, const Step *step, const float *projected, i64 row, i64 head, float *out,
                   float *scratch) {
    i64 dim = layer->head_dim, group = layer->query_heads / layer->kv_heads, queries = step->width * group;
    i64 in_width = projected_width(layer), out_width = layer->query_heads * dim, kv_width = layer->kv_heads * dim;
    i64 start = step->starts[row], length = start + step->counts[row], places[TILE + AHEAD];
    float *scores = scratch, *maxima = scores + queries * TILE, *totals = maxima + queries, *sums = totals + queries;
    const float *rows[4], *own_queries = projected + row * step->width * in_width + head * group * dim;
    float scale = 1.0f / sqrtf((float)dim);
    for (i64 q = 0; q < queries; q++) maxima[q] = -INFINITY;
    memset(totals, 0, sizeof(float) * (size_t)(queries * (1 + dim))); /* and sums behind it */
    for (i64 begin = 0; begin < length; begin += TILE) {
        i64 left = length - begin, size = left < TILE ? left : TILE, reach = left < TILE + AHEAD ? left : TILE + AHEAD;
        for (i64 j = 0; j < reach;) { /* block by block */
            i64 in_block = step->block_size - (begin + j) % step->block_size;
            i64 place = cache_row(step, row, begin + j) * kv_width + head * dim;
            for (; in_block > 0 && j < reach; in_block--, j++, place += kv_width) places[j] = place;
        }
        for (i64 j = 0; j < size; j += 4) {
            for (i64 r = j; r < j + 4 && r < size; r++) {
                fetch(layer->value + places[r], dim);
                if (r + AHEAD < reach) fetch(layer->key + places[r + AHEAD], dim);
            }
            pick_rows(layer->key, places, j, size, rows);
            for (i64 t = 0; t < step->width; t++)
                four_rows_all((const void *const *)rows, 0, own_queries + t * in_width, dim, dim, group,
                              scores + t * group * TILE + j, TILE, NULL);
        }
        for (i64 q = 0; q < queries; q++) {
            i64 seen = start + q / group + 1 - begin; /* causal: how many of this tile this query may see */
            if (seen > size) seen = size;
            if (seen <= 0) continue;
            float *own = scores + q * TILE, *sum = sums + q * dim;
            weigh(own, seen, scale, maxima + q, totals + q, sum, dim);
            for (i64 j = 0; j < seen; j += 4) {
                pick_rows(layer->value, places, j, size, rows);
                add_rows(sum, own + j, rows, seen - j < 4 ? seen - j : 4, dim);
            }
        }
    }
    for (i64 q = 0; q < queries; q++) {
        i64 token = row * step->width + q / group, place = (head * group + q % group) * dim;
        const float *gate = projected + token * in_width + (layer->query_heads + layer->kv_heads) * dim + place;
        float *own = out + token * out_width + place;
        for (i64 d = 0; d < dim; d++) own[d] = sums[q * dim + d] / totals[q] * sigmoid(gate[d]);
    }
}

/* y [tokens, hidden] = gated attention of the normed x: this rank's part; writes KEY and VALUE of all real tokens. */
static void attention(const Attention *layer, const Step *step, const float *x, float *y) {
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
                attend(layer, step, projected, row, head, mixed,
                       tiles + omp_get_thread_num() * attend_scratch(layer, step));
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

static i64 delta_scratch(const Delta *layer, const Step *step) {
    i64 tokens = step->rows * step->width, channels = channel_count(layer);
    i64 per_token = layer->hidden + delta_width(layer) + channels + layer->value_heads * layer->value_dim;
    i64 windows = step->rows * (layer->taps - 1 + step->width) * channels;
    return tokens * per_token + windows + step->threads * rule_scratch(layer);
}

/* Channels [begin, end) of one row: silu of the causal convolution for its tokens; moves the slot's window on. */
INLINE void convolve(const Delta *layer, const Step *step, i64 row, i64 begin, i64 end, const float *packed,
                     float *window, float *out) {
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
            for (i64 c = begin; c < end; c++)
                own[c] += window[(t + k) * channels + c] * layer->kernel[k * channels + c];
        silu(own + begin, NULL, end - begin, own + begin);
    }
}

/* unit = x / sqrt(sum(x²) + eps) */
INLINE void normalise(const float *x, float eps, i64 n, float *unit) {
    float scale = 1.0f / sqrtf(dot(x, x, n) + eps);
    for (i64 d = 0; d < n; d++) unit[d] = x[d] * scale;
}

/* remembered = keyᵀ · state and answered = queryᵀ · state, for state [dk, dv] */
INLINE void read_state(const float *state, const float *key, const float *query, i64 dk, i64 dv, float *remembered,
                       float *answered) {
    i64 d = 0;
    for (; d + 32 <= dv; d += 32) { /* as many columns as registers hold sums of: whole lines, side by side */
        v8 remembers[4] = {{0}}, answers[4] = {{0}};
        for (i64 i = 0; i < dk; i++) {
            const float *row = state + i * dv;
            if (d == 0 && i + AHEAD < dk) fetch(row + AHEAD * dv, dv);
            for (int c = 0; c < 4; c++) {
                v8 values = load(row + d + 8 * c);
                remembers[c] += key[i] * values;
                answers[c] += query[i] * values;
            }
        }
        for (int c = 0; c < 4; c++) {
            *(v8 *)(remembered + d + 8 * c) = remembers[c];
            *(v8 *)(answered + d + 8 * c) = answers[c];
        }
    }
    for (; d < dv; d++) {
        remembered[d] = answered[d] = 0;
        for (i64 i = 0; i < dk; i++) {
            remembered[d] += key[i] * state[i * dv + d];
            answered[d] += query[i] * state[i * dv + d];
        }
    }
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
        float rate = softplus(in[out_width + layer->value_heads + head] + layer->dt_bias[head]);
        float decay = expf(rate * layer->decay[head]);
        normalise(own + key_head * dk, layer->unit_eps, dk, query);
        normalise(own + (layer->key_heads + key_head) * dk, layer->unit_eps, dk, key);
        read_state(state, key, query, dk, dv, fresh, mixed);
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
        silu(gate, target, dv, target);
    }
}

/* y [tokens, hidden] = the gated delta-net of the normed x: this rank's part; advances CONV and SSM of each row. */
static void delta(const Delta *layer, const Step *step, const float *x, float *y) {
    i64 rows = step->rows, tokens = rows * step->width, hidden = layer->hidden;
    i64 channels = channel_count(layer), in_width = delta_width(layer);
    i64 out_width = layer->value_heads * layer->value_dim;
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
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (i64 row = 0; row < rows; row++)
            for (i64 head = 0; head < layer->value_heads; head++)
                rule(layer, step, row, head, packed, convolved, mixed, locals + thread * rule_scratch(layer));
        product(mixed, tokens, out_width, layer->output, hidden, y);
    }
}

/* -- halves of layers ---------------------------------------------------------------------------------------------- */

enum { ATTENTION, DELTA, MLP };

typedef struct {
    i64 kind;
    const void *half;
} Half;

i64 kvferry_scratch(const Half *halves, i64 count, const Step *step) {
    i64 most = 0;
    for (const Half *h = halves; h < halves + count; h++) {
        i64 own = h->kind == ATTENTION ? attention_scratch(h->half, step)
                  : h->kind == DELTA   ? delta_scratch(h->half, step)
                                       : mlp_scratch(h->half, step);
        if (own > most) most = own;
    }
    return most;
}

/* y [tokens, hidden] = the last of `count` halves of x, after each half before it was added to x. */
void kvferry_halves(const Half *halves, i64 count, const Step *step, i64 hidden, float *x, float *y) {
    for (i64 i = 0; i < count; i++) {
        if (i)
            for (i64 d = 0; d < step->rows * step->width * hidden; d++) x[d] += y[d];
        switch (halves[i].kind) {
            case ATTENTION: attention(halves[i].half, step, x, y); break;
            case DELTA: delta(halves[i].half, step, x, y); break;
            default: mlp(halves[i].half, step, x, y);
        }
    }
}
