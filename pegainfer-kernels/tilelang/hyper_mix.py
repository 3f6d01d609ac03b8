"""The mixing of manifold-constrained hyper-connections (DeepSeek-V4): ops::deepseek_v4::hyper_mix.

With x all four streams of a token and m = (function . x) * rsqrt(mean(x^2) + norm_eps), 24 values:

    mixed   = sum_j pre[j] stream[j]        pre[j] = sigmoid(m[j] scale[0] + base[j]) + eps
    post[j] = 2 sigmoid(m[4 + j] scale[1] + base[4 + j])
    comb    = m[8..24] scale[2] + base[8..24] as [4, 4], made doubly stochastic (Sinkhorn)

hyper_mix_products splits the sums over the streams among blocks (split-K); hyper_mix_apply adds the partial sums. All f32,
as the reference: tensor cores would round the terms. CPU reference: src/cpu/deepseek_v4/hyper.rs; launcher:
src/cuda/hyper_mix.rs, which chooses `splits`.

    streams   [tokens, 4 hidden] bf16       function  [24, 4 hidden] f32
    partial   [tokens, splits, 32] f32: 24 dot products, the sum of squares, 7 unused
    base      [24] f32                      scale     [3] f32
    mixed     [tokens, hidden] bf16         post      [tokens, 4] f32         comb  [tokens, 16] f32

hidden is a multiple of 8, and given in vectors of 4 elements. Bound by the L2, from which every TOKENS tokens read the function (1.5 MB at hidden 4096).
"""
import tilelang.language as T

STREAMS, MIXES = 4, 24
SUMS, STRIDE = MIXES + 1, 32
THREADS, WARPS = 128, 4
TOKENS = 4  # of a block of hyper_mix_products
COLUMNS = 1024  # of the streams a split, and of the output a block
VECTOR = 4


def dot_products():
    tokens, vectors, splits = T.dynamic("tokens"), T.dynamic("vectors"), T.dynamic("splits")
    hidden = VECTOR * vectors

    @T.prim_func
    def hyper_mix_products(
        streams: T.Tensor((tokens, STREAMS * hidden), "bfloat16"),
        function: T.Tensor((MIXES, STREAMS * hidden), "float32"),
        partial: T.Tensor((tokens, splits, STRIDE), "float32"),
    ):
        with T.Kernel(splits, T.ceildiv(tokens, TOKENS), threads=THREADS) as (split, group):
            thread = T.get_thread_binding()
            x = T.alloc_local((TOKENS, VECTOR), "float32")
            f = T.alloc_local((VECTOR,), "float32")
            sums = T.alloc_local((TOKENS * SUMS,), "float32")
            shared = T.alloc_shared((WARPS, TOKENS * STRIDE), "float32")
            for i in T.unroll(TOKENS * SUMS):
                sums[i] = 0.0
            for step in T.serial(COLUMNS // (THREADS * VECTOR)):
                column = split * COLUMNS + (step * THREADS + thread) * VECTOR
                if column < STREAMS * hidden:
                    for t in T.unroll(TOKENS):
                        for v in T.unroll(VECTOR):
                            x[t, v] = 0.0
                        if group * TOKENS + t < tokens:
                            for v in T.vectorized(VECTOR):
                                x[t, v] = T.cast(streams[group * TOKENS + t, column + v], "float32")
                    for k in T.unroll(MIXES):
                        for v in T.vectorized(VECTOR):
                            f[v] = function[k, column + v]
                        for t in T.unroll(TOKENS):
                            for v in T.unroll(VECTOR):
                                sums[t * SUMS + k] += x[t, v] * f[v]
                    for t in T.unroll(TOKENS):
                        for v in T.unroll(VECTOR):
                            sums[t * SUMS + MIXES] += x[t, v] * x[t, v]
            for t in T.unroll(TOKENS):
                for k in T.unroll(SUMS):
                    for step in T.unroll(5):
                        sums[t * SUMS + k] += T.shfl_xor(sums[t * SUMS + k], 16 >> step)
                    if thread % 32 == 0:
                        shared[thread // 32, t * STRIDE + k] = sums[t * SUMS + k]
            T.sync_threads()
            # One thread a sum: TOKENS * STRIDE of them.
            if group * TOKENS + thread // STRIDE < tokens:
                if thread % STRIDE < SUMS:
                    partial[group * TOKENS + thread // STRIDE, split, thread % STRIDE] = (
                        shared[0, thread] + shared[1, thread] + shared[2, thread] + shared[3, thread])

    return hyper_mix_products


def sigmoid(x):
    return 1.0 / (1.0 + T.exp(-x))


def apply():
    tokens, vectors, splits = T.dynamic("tokens"), T.dynamic("vectors"), T.dynamic("splits")
    hidden = VECTOR * vectors

    @T.prim_func
    def hyper_mix_apply(
        streams: T.Tensor((tokens, STREAMS, hidden), "bfloat16"),
        partial: T.Tensor((tokens, splits, STRIDE), "float32"),
        base: T.Tensor((MIXES,), "float32"),
        scale: T.Tensor((3,), "float32"),
        mixed: T.Tensor((tokens, hidden), "bfloat16"),
        post: T.Tensor((tokens, STREAMS), "float32"),
        comb: T.Tensor((tokens, STREAMS * STREAMS), "float32"),
        iters: T.int32,
        eps: T.float32,
        norm_eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(hidden, COLUMNS), tokens, threads=THREADS) as (block, token):
            thread = T.get_thread_binding()
            m = T.alloc_shared((STRIDE,), "float32")
            total = T.alloc_local((1,), "float32")
            pre = T.alloc_local((STREAMS,), "float32")
            x = T.alloc_local((VECTOR,), "float32")
            out = T.alloc_local((VECTOR,), "float32")
            c = T.alloc_local((STREAMS * STREAMS,), "float32")
            if thread < SUMS:
                total[0] = 0.0
                for split in T.serial(splits):
                    total[0] += partial[token, split, thread]
                m[thread] = total[0]
            T.sync_threads()
            norm = T.rsqrt(m[MIXES] / T.cast(STREAMS * hidden, "float32") + norm_eps)
            for j in T.unroll(STREAMS):
                pre[j] = sigmoid(m[j] * norm * scale[0] + base[j]) + eps
            for step in T.serial(COLUMNS // (THREADS * VECTOR)):
                vector = (block * (COLUMNS // VECTOR)) + step * THREADS + thread
                if vector < vectors:
                    for v in T.unroll(VECTOR):
                        out[v] = 0.0
                    for j in T.unroll(STREAMS):
                        for v in T.vectorized(VECTOR):
                            x[v] = T.cast(streams[token, j, vector * VECTOR + v], "float32")
                        for v in T.unroll(VECTOR):
                            out[v] += pre[j] * x[v]
                    for v in T.vectorized(VECTOR):
                        mixed[token, vector * VECTOR + v] = T.cast(out[v], "bfloat16")
            if block == 0 and thread < STREAMS:
                post[token, thread] = 2.0 * sigmoid(m[STREAMS + thread] * norm * scale[1] + base[STREAMS + thread])
            # Another warp than that of post; a token's 40 dependent sums hide behind the other blocks.
            if block == 0 and thread == 32:
                for i in T.unroll(STREAMS * STREAMS):
                    c[i] = m[2 * STREAMS + i] * norm * scale[2] + base[2 * STREAMS + i]
                for j in T.unroll(STREAMS):
                    total[0] = T.max(T.max(c[4 * j], c[4 * j + 1]), T.max(c[4 * j + 2], c[4 * j + 3]))
                    for k in T.unroll(STREAMS):
                        c[4 * j + k] = T.exp(c[4 * j + k] - total[0])
                    total[0] = 1.0 / (c[4 * j] + c[4 * j + 1] + c[4 * j + 2] + c[4 * j + 3])
                    for k in T.unroll(STREAMS):
                        c[4 * j + k] = c[4 * j + k] * total[0] + eps
                for round in T.serial(iters):
                    if round > 0:
                        for j in T.unroll(STREAMS):
                            total[0] = 1.0 / (c[4 * j] + c[4 * j + 1] + c[4 * j + 2] + c[4 * j + 3] + eps)
                            for k in T.unroll(STREAMS):
                                c[4 * j + k] *= total[0]
                    for k in T.unroll(STREAMS):
                        total[0] = 1.0 / (c[k] + c[4 + k] + c[8 + k] + c[12 + k] + eps)
                        for j in T.unroll(STREAMS):
                            c[4 * j + k] *= total[0]
                for i in T.unroll(STREAMS * STREAMS):
                    comb[token, i] = c[i]

    return hyper_mix_apply


KERNELS = [dot_products, apply]
