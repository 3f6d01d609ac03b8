// Online softmax in base 2 over tiles of scores in accumulators of the tensor cores (arXiv 1805.02867), for prefill.
#pragma once
#include "common/math.cuh"
#include "common/warp.cuh"

// A lane's two rows, those of an accumulator: the running max of the scores, and the sum of the weights of its own
// columns, relative to 2^(max * scale).
struct Softmax {
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};

    // From scores to weights. `limits`: the last column that each row sees. Returns what earlier weights are rescaled
    // by.
    template <bool Masked, int N> __device__ float2 apply(float (&s)[N], const int (&limits)[2], float scale) {
        // Two chains a row, of one operation each: the next instruction need not wait for the last.
        float maxima[2][2] = {{max[0], max[0]}, {max[1], max[1]}}, sums[2][2] = {}, rescale[2], base[2];
#pragma unroll
        for (int j = 0; j < N / 4; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float &x = s[4 * j + i];
                if (Masked && 8 * j + i % 2 > limits[i / 2]) x = -INFINITY;
                maxima[i / 2][i % 2] = fmaxf(maxima[i / 2][i % 2], x);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float new_max = fmaxf(maxima[r][0], maxima[r][1]);
            new_max = reduce_quad(new_max, Max());
            base[r] = Masked && new_max == -INFINITY ? 0.f : new_max * scale; // no token seen yet: all weights are 0
            rescale[r] = exp2_approx(max[r] * scale - base[r]);
            max[r] = new_max;
        }
#pragma unroll
        for (int j = 0; j < N / 4; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float &x = s[4 * j + i];
                x = exp2_approx(x * scale - base[i / 2]);
                sums[i / 2][i % 2] += x;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = sum[r] * rescale[r] + (sums[r][0] + sums[r][1]);
        return make_float2(rescale[0], rescale[1]);
    }
};
