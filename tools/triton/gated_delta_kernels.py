"""The gated delta rule in chunks of 64 tokens as Triton kernels, for gated_delta.py to check and to time.

Per chunk and value head, with G the running sum of the log decays, D_ij = exp(G_i - G_j) for j <= i, S [v, k] the state
before the chunk, a = 1 / |k| and c = 128^-1/2 / |q|:

    T = (I + A)^-1 diag(beta)     A_ij = beta_i a_i a_j (k_i . k_j) D_ij for j < i, else 0
    N = T (V - diag(exp(G) a) K S^T)
    O = diag(exp(G) c) Q S^T + P N           P_ij = c_i a_j (q_i . k_j) D_ij
    S' = exp(G_last) S + (diag(exp(G_last - G) a) N)^T K

T, P and the scales of all chunks come from one kernel; a second walks along each sequence, for some rows of a head's
state. Segments are [first token, end, slot of the state before, slot of the state after], the third -1 where a sequence
begins. Both start while the kernel before them ends, and wait for it before they read.
"""
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def merge(x, a, N: tl.constexpr, SIZE: tl.constexpr):
    """From the inverses of the diagonal blocks of SIZE / 2 of I + a to those of SIZE: the corner is -x a x. x, a:
    [blocks, N, N], or [N, N]. No element of a or of an inverse is above 1, so that f16 is as good as tf32."""
    at = tl.arange(0, N)
    block, half = at // SIZE, at // (SIZE // 2)
    corner = (block[:, None] == block[None, :]) & (half[:, None] > half[None, :])
    if len(x.shape) == 3:
        corner = tl.broadcast_to(corner[None, :, :], x.shape)
    b = x.to(tl.float16)
    return x - tl.dot(tl.dot(b, tl.where(corner, a, 0.0).to(tl.float16)).to(tl.float16), b)


@triton.jit
def invert(a, N: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular [N, N]: diagonal blocks of 16 on their own, then all at once."""
    i, at = tl.arange(0, N // 16), tl.arange(0, 16)
    diagonal = (i[:, None] == i[None, :])[:, None, :, None]
    small = tl.sum(tl.where(diagonal, tl.reshape(a, (N // 16, 16, N // 16, 16)), 0.0), axis=2)
    pair = (at[:, None] == at[None, :] + 1) & (at[:, None] % 2 == 1)
    unit = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    x = unit[None, :, :] - tl.where(pair[None, :, :], small, 0.0)
    x = merge(x, small, 16, 4)
    x = merge(x, small, 16, 8)
    x = merge(x, small, 16, 16)
    x = tl.reshape(tl.where(diagonal, x[:, :, None, :], 0.0), (N, N))
    x = merge(x, a, N, 32)
    return merge(x, a, N, 64)


@triton.jit
def power(x):
    """2^x; what is denormal is 0, which saves instructions."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def parts_kernel(qk, projected, a_log, dt_bias, segments, solve, weights, scales, count, COUNT: tl.constexpr,
                 KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
                 HEAD: tl.constexpr, CHUNK: tl.constexpr):
    """grid: (value heads, chunk numbers). Chunks are numbered from first / 64 + i on for segment i."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    CHANNELS: tl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * HEAD
    WIDTH: tl.constexpr = CHANNELS + VALUE_HEADS * HEAD + 2 * VALUE_HEADS
    gdc_launch_dependents()
    head, chunk = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, COUNT)
    firsts = tl.load(segments + 4 * i, mask=i < count, other=1 << 30)
    ends = tl.load(segments + 4 * i + 1, mask=i < count, other=0)
    index = tl.sum((firsts // CHUNK + i <= chunk).to(tl.int32), axis=0) - 1
    first, end = tl.sum(tl.where(i == index, firsts, 0), axis=0), tl.sum(tl.where(i == index, ends, 0), axis=0)
    first += (chunk - first // CHUNK - index) * CHUNK
    gdc_wait()
    if first < end:
        t = tl.arange(0, CHUNK)
        inside = first + t < end
        row = (first + t).to(tl.int64)
        # Tokens after the last one change nothing: their beta is 0.
        q = qk.load([first, head // GROUP * HEAD])
        k = qk.load([first, (KEY_HEADS + head // GROUP) * HEAD])
        # b and a in one tensor, and sums of one element each: a small one would be computed again in every layout.
        pair = tl.arange(0, 2)[None, :]
        gates = projected + row[:, None] * WIDTH + CHANNELS + VALUE_HEADS * HEAD + head + VALUE_HEADS * pair
        x = tl.load(gates, mask=inside[:, None], other=0.0).to(tl.float32)
        beta = tl.sum(tl.where(inside[:, None] & (pair == 0), tl.sigmoid(x), 0.0), axis=1)
        x += tl.load(dt_bias + head)
        softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))
        log = tl.sum(tl.where(inside[:, None] & (pair == 1), softplus, 0.0), axis=1)
        log *= -1.4426950408889634 * tl.exp(tl.load(a_log + head))
        g = tl.cumsum(log, axis=0)
        last = tl.sum(log, axis=0)
        qq = tl.dot(q, tl.trans(q))
        c = tl.rsqrt(tl.sum(tl.where(t[:, None] == t[None, :], qq, 0.0), axis=1) + 1e-6) * (HEAD ** -0.5)
        kk = tl.dot(k, tl.trans(k))
        a = tl.rsqrt(tl.sum(tl.where(t[:, None] == t[None, :], kk, 0.0), axis=1) + 1e-6)
        part = chunk * VALUE_HEADS + head
        vector = scales + part.to(tl.int64) * 4 * CHUNK + t
        tl.store(vector, tl.exp2(g) * a)
        tl.store(vector + CHUNK, tl.exp2(last - g) * a)
        tl.store(vector + 2 * CHUNK, tl.exp2(g) * c)
        tl.store(vector + 3 * CHUNK, tl.exp2(last + 0.0 * g))
        # Above the diagonal it may be infinite, which is not chosen.
        decay = power(g[:, None] - (g - tl.log2(a))[None, :])
        p = tl.dot(q, tl.trans(k)) * decay * c[:, None]
        weights.store([part * CHUNK, 0], tl.where(t[:, None] >= t[None, :], p, 0.0).to(tl.bfloat16))
        x = kk * decay * (beta * a)[:, None]
        x = invert(tl.where(t[:, None] > t[None, :], x, 0.0), CHUNK) * beta[None, :]
        solve.store([part * CHUNK, 0], x.to(tl.bfloat16))


@triton.jit
def walk_kernel(qk, values, solve, weights, scales, segments, states, out, ROWS: tl.constexpr,
                WIDE: tl.constexpr, STAGES: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
                HEAD: tl.constexpr, CHUNK: tl.constexpr):
    """grid: (slices of ROWS rows of all heads' states, segments). WIDE: the rows are those of every product, so that
    its first operand is in registers; else tokens or elements of k are."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    SLICES: tl.constexpr = HEAD // ROWS
    gdc_launch_dependents()
    gdc_wait()
    head, slice, i = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES, tl.program_id(1)
    first, end = tl.load(segments + 4 * i), tl.load(segments + 4 * i + 1)
    source, target = tl.load(segments + 4 * i + 2), tl.load(segments + 4 * i + 3)
    r, d, t = slice * ROWS + tl.arange(0, ROWS), tl.arange(0, HEAD), tl.arange(0, CHUNK)
    if WIDE:
        square = head * HEAD * HEAD + r[:, None] * HEAD + d[None, :]
        token, column = t[None, :], head * HEAD + r[:, None]
    else:
        square = head * HEAD * HEAD + r[None, :] * HEAD + d[:, None]
        token, column = t[:, None], head * HEAD + r[None, :]
    SIZE: tl.constexpr = VALUE_HEADS * HEAD * HEAD
    s = tl.load(states + source.to(tl.int64) * SIZE + square, mask=(source >= 0) & (square >= 0), other=0.0)
    number = first // CHUNK + i
    for at in tl.range(first, end, CHUNK, num_stages=STAGES):
        part = (number + (at - first) // CHUNK) * VALUE_HEADS + head
        k = qk.load([at, (KEY_HEADS + head // GROUP) * HEAD])
        v = values.load([at, (2 * KEY_HEADS + head) * HEAD + slice * ROWS])
        inverse = solve.load([part * CHUNK, 0])
        vector = scales + part.to(tl.int64) * 4 * CHUNK
        keys, carry = tl.load(vector + t), tl.load(vector + CHUNK + t)
        decay = tl.load(vector + 3 * CHUNK)
        b = s.to(tl.bfloat16)
        if WIDE:
            x = tl.trans(v).to(tl.float32) - keys[None, :] * tl.dot(b, tl.trans(k))
            n = tl.dot(x.to(tl.bfloat16), tl.trans(inverse))
            c = (n * carry[None, :]).to(tl.bfloat16)
        else:
            x = v.to(tl.float32) - keys[:, None] * tl.dot(k, b)
            n = tl.dot(inverse, x.to(tl.bfloat16))
            c = (n * carry[:, None]).to(tl.bfloat16)
        n = n.to(tl.bfloat16)
        q = qk.load([at, head // GROUP * HEAD])
        p = weights.load([part * CHUNK, 0])
        queries = tl.load(vector + 2 * CHUNK + t)
        if WIDE:
            o = tl.dot(n, tl.trans(p), queries[None, :] * tl.dot(b, tl.trans(q)))
        else:
            o = tl.dot(p, n, queries[:, None] * tl.dot(q, b))
        tl.store(out + (at + token).to(tl.int64) * (VALUE_HEADS * HEAD) + column, o, mask=at + token < end)
        if WIDE:
            s = tl.dot(c, k, s * decay)
        else:
            s = tl.dot(tl.trans(k), c, s * decay)
    if target >= 0:
        tl.store(states + target.to(tl.int64) * SIZE + square, s)
