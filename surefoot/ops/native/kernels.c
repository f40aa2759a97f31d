/* Elementwise passes of a training step over bf16 activations, each through memory once, with fp32 arithmetic.
 *
 * Plain C with OpenMP: compilers vectorise the loops. Parallel regions run on the threads of the OpenMP library that
 * PyTorch has loaded (see build.py). Names: n rows, d width, x input, y output, g gradient.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;

static inline float widen(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

/* Round to nearest even; a NaN stays a NaN. */
static inline bf16 narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? (bf16)((bits >> 16) | 0x40u) : (bf16)rounded;
}

/* exp to 2e-7 relative: 2^(x log2 e), the fraction by a polynomial (Cephes' coefficients), the rest as an exponent. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : (x > 89.0f ? 89.0f : x); /* infinite from 88.7 on */
    float scaled = x * 1.44269504088896341f;
    float whole = (scaled + 12582912.0f) - 12582912.0f;
    float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float series = 1.9875691500e-4f;
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * rest * rest + rest + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return series * power;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

/* y = x / sqrt(mean(x^2) + eps) * weight; inverse keeps 1 / sqrt(...) of each row. */
void rms_norm_forward(int64_t n, int64_t d, const bf16 *x, const float *weight, float eps, bf16 *y, float *inverse) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < n; row++) {
        const bf16 *in = x + row * d;
        bf16 *out = y + row * d;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < d; i++) sum += widen(in[i]) * widen(in[i]);
        float scale = 1.0f / __builtin_sqrtf(sum / (float)d + eps);
        inverse[row] = scale;
#pragma omp simd
        for (int64_t i = 0; i < d; i++) out[i] = narrow(widen(in[i]) * scale * weight[i]);
    }
}

/* gx of x, and gweight summed over rows: each of `parts` runs of rows has a sum of its own in `partial` (parts x d). */
void rms_norm_backward(int64_t n, int64_t d, int64_t parts, const bf16 *x, const float *weight, const float *inverse,
                       const bf16 *g, bf16 *gx, float *partial) {
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < parts; part++) {
        float *sums = partial + part * d;
        memset(sums, 0, (size_t)d * sizeof(float));
        for (int64_t row = part * n / parts; row < (part + 1) * n / parts; row++) {
            const bf16 *in = x + row * d, *grad = g + row * d;
            bf16 *out = gx + row * d;
            float scale = inverse[row], along = 0.0f;
#pragma omp simd reduction(+ : along)
            for (int64_t i = 0; i < d; i++) {
                float product = widen(grad[i]) * (widen(in[i]) * scale);
                sums[i] += product;
                along += product * weight[i];
            }
            along /= (float)d;
#pragma omp simd
            for (int64_t i = 0; i < d; i++)
                out[i] = narrow((widen(grad[i]) * weight[i] - widen(in[i]) * scale * along) * scale);
        }
    }
}

/* y = silu(gate) up */
void swiglu_forward(int64_t n, const bf16 *gate, const bf16 *up, bf16 *y) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) {
        float a = widen(gate[i]);
        y[i] = narrow(a * sigmoid(a) * widen(up[i]));
    }
}

void swiglu_backward(int64_t n, const bf16 *gate, const bf16 *up, const bf16 *g, bf16 *ggate, bf16 *gup) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) {
        float a = widen(gate[i]), s = sigmoid(a), grad = widen(g[i]);
        gup[i] = narrow(grad * a * s);
        ggate[i] = narrow(grad * widen(up[i]) * s * (1.0f + a * (1.0f - s)));
    }
}

/* Turn component i with component i + size / 2 of each head by its position's angle; direction 1 or -1.
 * x is (batch, length, heads, size) with strides of the first two given and the rest dense; tables are
 * (length, size / 2), or (batch, length, size / 2) where table_batch is length * size / 2 instead of 0. */
void rotate(int64_t batch, int64_t length, int64_t heads, int64_t size, const bf16 *x, int64_t stride_batch,
            int64_t stride_length, const float *cosine, const float *sine, int64_t table_batch, float direction,
            bf16 *y) {
    int64_t half = size / 2;
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t b = 0; b < batch; b++) {
        for (int64_t l = 0; l < length; l++) {
            const float *c = cosine + b * table_batch + l * half, *s = sine + b * table_batch + l * half;
            for (int64_t h = 0; h < heads; h++) {
                const bf16 *in = x + b * stride_batch + l * stride_length + h * size;
                bf16 *out = y + ((b * length + l) * heads + h) * size;
#pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    float left = widen(in[i]), right = widen(in[i + half]), turn = direction * s[i];
                    out[i] = narrow(left * c[i] - right * turn);
                    out[i + half] = narrow(right * c[i] + left * turn);
                }
            }
        }
    }
}

/* y of each of n tokens: the sum of its k rows of x, each times its weight (1 where weight is null). */
void sum_rows(int64_t n, int64_t k, int64_t d, const bf16 *x, const int64_t *rows, const float *weight, bf16 *y) {
#pragma omp parallel
    {
        float *sums = malloc((size_t)d * sizeof(float));
#pragma omp for schedule(static)
        for (int64_t token = 0; token < n; token++) {
            bf16 *out = y + token * d;
            memset(sums, 0, (size_t)d * sizeof(float));
            for (int64_t j = token * k; j < (token + 1) * k; j++) {
                const bf16 *in = x + rows[j] * d;
                float scale = weight ? weight[j] : 1.0f;
#pragma omp simd
                for (int64_t i = 0; i < d; i++) sums[i] += scale * widen(in[i]);
            }
#pragma omp simd
            for (int64_t i = 0; i < d; i++) out[i] = narrow(sums[i]);
        }
        free(sums);
    }
}

/* Backward of sum_rows: gx of each row, which belongs to one token alone, and gweight. */
void spread_rows(int64_t n, int64_t k, int64_t d, const bf16 *x, const int64_t *rows, const float *weight,
                 const bf16 *g, bf16 *gx, float *gweight) {
#pragma omp parallel for schedule(static)
    for (int64_t token = 0; token < n; token++) {
        const bf16 *grad = g + token * d;
        for (int64_t j = token * k; j < (token + 1) * k; j++) {
            const bf16 *in = x + rows[j] * d;
            bf16 *out = gx + rows[j] * d;
            float scale = weight[j], along = 0.0f;
#pragma omp simd reduction(+ : along)
            for (int64_t i = 0; i < d; i++) {
                along += widen(grad[i]) * widen(in[i]);
                out[i] = narrow(scale * widen(grad[i]));
            }
            gweight[j] = along;
        }
    }
}

/* Cross-entropy of n rows of v logits, and in their place its gradient, where `writes`. A row whose target is negative counts
 * nothing. Of each row: nll = log sum exp - logit of the target, and log sum exp itself, both zero where it counts nothing.
 * gradient = p (1 + 2 z log sum exp) - onehot. */
void cross_entropy(int64_t n, int64_t v, bf16 *logits, const int64_t *targets, float z, int64_t writes, float *nll,
                   float *log_total) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < n; row++) {
        bf16 *values = logits + row * v;
        int64_t target = targets[row];
        if (target < 0) {
            nll[row] = log_total[row] = 0.0f;
            if (writes) memset(values, 0, (size_t)v * sizeof(bf16));
            continue;
        }
        float top = -__builtin_inff(), sum = 0.0f;
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < v; i++) top = widen(values[i]) > top ? widen(values[i]) : top;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < v; i++) sum += exponential(widen(values[i]) - top);
        float log_sum = top + __builtin_logf(sum), picked = widen(values[target]);
        nll[row] = log_sum - picked;
        log_total[row] = log_sum;
        if (!writes) continue;
        float scale = (1.0f + 2.0f * z * log_sum) / sum;
#pragma omp simd
        for (int64_t i = 0; i < v; i++) values[i] = narrow(exponential(widen(values[i]) - top) * scale);
        values[target] = narrow(exponential(picked - top) * scale - 1.0f);
    }
}
