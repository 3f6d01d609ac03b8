"""The gated delta rule in chunks of 64 tokens (the WY form; Yang et al., arXiv 2412.06464), for heads of 128.

Per chunk and value head, with G the running sum of the log decays, D_ij = exp(G_i - G_j) for j <= i, S [v, k] the state
before the chunk, a = 1 / |k| and c = 128^-1/2 / |q|:

    T = (I + A)^-1 diag(beta)     A_ij = beta_i a_i a_j (k_i . k_j) D_ij for j < i, else 0
    N = T (V - diag(exp(G) a) K S^T)
    O = diag(exp(G) c) Q S^T + P N           P_ij = c_i a_j (q_i . k_j) D_ij
    S' = exp(G_last) S + (diag(exp(G_last - G) a) N)^T K

Operands are those of ops::gated_delta_chunks. gated_delta_intra writes T, P and the scales of all chunks at once;
gated_delta_scan goes through the chunks of each chain of segments with ROWS rows of a head's state in registers.

    mixed      [tokens, (2 key_heads + value_heads) * 128] bf16: q, k, v; read as the tiles `qk` and `values`
    projected  [tokens, channels + value_heads * 130, rounded up to 8] bf16, of which b and a are read
    a_log, dt_bias  [value_heads] f32
    segments   [count, 4] i32: first token, end, slot of the state before, slot of the state after; -1 for no slot
    solve, weights  T and P, [chunk numbers * value_heads * 64, 64] bf16
    scales     [chunk numbers * value_heads, 4, 64] f32: exp(G) a, exp(G_last - G) a, exp(G) c, exp(G_last)
    states     [slots, value_heads, 128, 128] f32
    out        [tokens, value_heads * 128] f32

Chunk c of segment i has the number first / 64 + i + c. GEMMs have operands in bf16 (f16 in the inverse) and sums in
f32. CPU reference: src/cpu/gated_delta. Both kernels are launched with programmatic dependent launch, and read no more
than `segments` and `states` before gdc_wait. Served where src/choice/delta.rs says; bound by the latency
of the dependent GEMMs of a chunk, 128 blocks at 32 heads.
"""
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aot import Kernel, Tile

HEAD, CHUNK = tl.constexpr(128), tl.constexpr(64)


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
def gated_delta_intra(qk, projected, a_log, dt_bias, segments, solve, weights, scales, count, key_heads, value_heads,
                      COUNT: tl.constexpr):
    """grid: (value heads, chunk numbers). COUNT: a power of two, at least `count`."""
    group = value_heads // key_heads
    channels = (2 * key_heads + value_heads) * HEAD
    width = (channels + value_heads * HEAD + 2 * value_heads + 7) // 8 * 8
    gdc_launch_dependents()
    head, chunk = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, COUNT)
    firsts = tl.load(segments + 4 * i, mask=i < count, other=1 << 30)
    ends = tl.load(segments + 4 * i + 1, mask=i < count, other=0)
    index = tl.sum((firsts // CHUNK + i <= chunk).to(tl.int32), axis=0) - 1
    first, end = tl.sum(tl.where(i == index, firsts, 0), axis=0), tl.sum(tl.where(i == index, ends, 0), axis=0)
    # A segment without tokens has one chunk, which changes nothing.
    skipped = (chunk - first // CHUNK - index) * CHUNK
    first += skipped
    gdc_wait()
    if (first < end) | (skipped == 0):
        t = tl.arange(0, CHUNK)
        inside = first + t < end
        row = (first + t).to(tl.int64)
        # Tokens after the last one change nothing: their beta is 0.
        q = qk.load([first, head // group * HEAD])
        k = qk.load([first, (key_heads + head // group) * HEAD])
        # b and a in one tensor, and sums of one element each: a small one would be computed again in every layout.
        pair = tl.arange(0, 2)[None, :]
        gates = projected + row[:, None] * width + channels + value_heads * HEAD + head + value_heads * pair
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
        part = chunk * value_heads + head
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
def segment(segments, count, i):
    """First token, end, slot of the state before and slot of the state after; no tokens and slots beyond the last."""
    at, there = segments + 4 * i, i < count
    return (tl.load(at, mask=there, other=0), tl.load(at + 1, mask=there, other=0),
            tl.load(at + 2, mask=there, other=-1), tl.load(at + 3, mask=there, other=-1))


@triton.jit
def chunk_count(tokens):
    return tl.maximum(tl.cdiv(tokens, CHUNK), 1)


@triton.jit
def gated_delta_scan(qk, values, solve, weights, scales, segments, states, out, count, key_heads, value_heads, longest,
                     ROWS: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr):
    """grid: (value heads * 128 / ROWS, segments). The program of a chain's first segment takes the chain; chains of at
    most `longest` tokens are left to the recurrence. WIDE: the state's rows are those of every GEMM, so that its first
    operand is in registers; else tokens or elements of k are."""
    SLICES: tl.constexpr = HEAD // ROWS
    SQUARE: tl.constexpr = HEAD * HEAD
    gdc_launch_dependents()
    head, slice, i = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES, tl.program_id(1)
    at, stop, source, to = segment(segments, count, i)
    before = tl.load(segments + 4 * i - 1, mask=i > 0, other=-1)
    begins, first = (source < 0) | (source != before), at
    # The chain ends where a segment does not go on from the slot that the one before it went to.
    _, next_stop, joined, next_to = segment(segments, count, i + 1)
    end, last, target, chunks = next_stop, stop, to, chunk_count(stop - at)
    j = i + 1
    while (joined >= 0) & (joined == target):
        chunks += chunk_count(end - last)
        last = end
        target = tl.load(segments + 4 * j + 3)
        j += 1
        _, end, joined, _ = segment(segments, count, j)
    r, d, t = slice * ROWS + tl.arange(0, ROWS), tl.arange(0, HEAD), tl.arange(0, CHUNK)
    if WIDE:
        square = head * SQUARE + r[:, None] * HEAD + d[None, :]
        token, column = t[None, :], head * HEAD + r[:, None]
    else:
        square = head * SQUARE + r[None, :] * HEAD + d[:, None]
        token, column = t[:, None], head * HEAD + r[None, :]
    size, group = value_heads * SQUARE, value_heads // key_heads
    gdc_wait()
    if begins & (last - first > longest):
        s = tl.load(states + source.to(tl.int64) * size + square, mask=(source >= 0) & (square >= 0), other=0.0)
        number = at // CHUNK + i
        for _ in tl.range(0, chunks, num_stages=STAGES):
            part = number * value_heads + head
            k = qk.load([at, (key_heads + head // group) * HEAD])
            v = values.load([at, (2 * key_heads + head) * HEAD + slice * ROWS])
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
            q = qk.load([at, head // group * HEAD])
            p = weights.load([part * CHUNK, 0])
            queries = tl.load(vector + 2 * CHUNK + t)
            if WIDE:
                o = tl.dot(n, tl.trans(p), queries[None, :] * tl.dot(b, tl.trans(q)))
            else:
                o = tl.dot(p, n, queries[:, None] * tl.dot(q, b))
            tl.store(out + (at + token).to(tl.int64) * (value_heads * HEAD) + column, o, mask=at + token < stop)
            if WIDE:
                s = tl.dot(c, k, s * decay)
            else:
                s = tl.dot(tl.trans(k), c, s * decay)
            # On to the next chunk, which may be the first of the next segment.
            ends = at + CHUNK >= stop
            tl.store(states + to.to(tl.int64) * size + square, s, mask=ends & (to >= 0) & (square >= 0))
            i += ends.to(tl.int32)
            number = tl.where(ends, stop // CHUNK + i, number + 1)
            at = tl.where(ends, stop, at + CHUNK)
            stop, to = tl.where(ends, next_stop, stop), tl.where(ends, next_to, to)
            _, next_stop, _, next_to = segment(segments, count, i + 1)


KERNELS = [
    Kernel(
        gated_delta_intra,
        architectures=(90,),
        signature=dict(
            qk=Tile("bf16", 64, 128), projected="*bf16", a_log="*fp32", dt_bias="*fp32", segments="*i32",
            solve=Tile("bf16", 64, 64), weights=Tile("bf16", 64, 64), scales="*fp32", count="i32", key_heads="i32",
            value_heads="i32"),
        constants=dict(COUNT=16),
        options=dict(num_warps=4, maxnreg=128)),
    Kernel(
        gated_delta_scan,
        architectures=(90,),
        signature=dict(
            qk=Tile("bf16", 64, 128), values=Tile("bf16", 64, 32), solve=Tile("bf16", 64, 64),
            weights=Tile("bf16", 64, 64), scales="*fp32", segments="*i32", states="*fp32", out="*fp32", count="i32",
            key_heads="i32", value_heads="i32", longest="i32"),
        constants=dict(ROWS=32, WIDE=False, STAGES=3),
        options=dict(num_warps=4)),
]
