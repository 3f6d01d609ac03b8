#!/usr/bin/env python3
"""The gated delta rule in chunks of 64 tokens as Triton kernels, to measure against the CUDA ones of pegainfer-kernels.

    python3 tools/triton/gated_delta.py                # checks, then a table of microseconds a layer
    python3 tools/triton/gated_delta.py --all          # every configuration, too

Needs torch, Triton 3.6 and a Hopper GPU. Operands as ops::gated_delta_chunks takes them, for Qwen3.5-4B's heads; each
sequence is one segment. Per chunk and value head, with G the running sum of the log decays, D_ij = exp(G_i - G_j) for
j <= i, S [v, k] the state before the chunk, a = 1 / |k| and c = 128^-1/2 / |q|:

    T = (I + A)^-1 diag(beta)     A_ij = beta_i a_i a_j (k_i . k_j) D_ij for j < i, else 0
    N = T (V - diag(exp(G) a) K S^T)
    O = diag(exp(G) c) Q S^T + P N           P_ij = c_i a_j (q_i . k_j) D_ij
    S' = exp(G_last) S + (diag(exp(G_last - G) a) N)^T K

T, P and the scales of all chunks come from one kernel; a second walks along each sequence, for some rows of a head's
state. It gives the outputs, too, or leaves S and N to a third, which computes those of all chunks at once.
"""
import argparse
import concurrent.futures
import itertools
import os
import statistics

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

KEY_HEADS, VALUE_HEADS, HEAD, CHUNK = 16, 32, 128, 64
GROUP = VALUE_HEADS // KEY_HEADS
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * HEAD
WIDTH = CHANNELS + VALUE_HEADS * HEAD + 2 * VALUE_HEADS
NO_STATE = -1
PDL = not os.environ.get("TRITON_INTERPRET")
BF16, F32 = torch.bfloat16, torch.float32


@triton.jit
def merge(x, a, N: tl.constexpr, SIZE: tl.constexpr):
    """From the inverses of the diagonal blocks of SIZE / 2 of I + a to those of SIZE: the corner is -x a x. x, a:
    [blocks, N, N], or [N, N]."""
    at = tl.arange(0, N)
    block, half = at // SIZE, at // (SIZE // 2)
    corner = (block[:, None] == block[None, :]) & (half[:, None] > half[None, :])
    if len(x.shape) == 3:
        corner = tl.broadcast_to(corner[None, :, :], x.shape)
    return x - tl.dot(tl.dot(x, tl.where(corner, a, 0.0)), x)


@triton.jit
def invert(a, N: tl.constexpr, SMALL: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular [N, N]; blocks up to SMALL on their own, then all at once."""
    BLOCKS: tl.constexpr = N // SMALL
    i = tl.arange(0, BLOCKS)
    diagonal = (i[:, None] == i[None, :])[:, None, :, None]
    small = tl.sum(tl.where(diagonal, tl.reshape(a, (BLOCKS, SMALL, BLOCKS, SMALL)), 0.0), axis=2)
    at = tl.arange(0, SMALL)
    below = (at[:, None] == at[None, :] + 1) & (at[:, None] % 2 == 1)
    unit = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    x = unit[None, :, :] - tl.where(below[None, :, :], small, 0.0)
    x = merge(x, small, SMALL, 4)
    x = merge(x, small, SMALL, 8)
    if SMALL >= 16:
        x = merge(x, small, SMALL, 16)
    if SMALL >= 32:
        x = merge(x, small, SMALL, 32)
    x = tl.reshape(tl.where(diagonal, x[:, :, None, :], 0.0), (N, N))
    if SMALL < 16:
        x = merge(x, a, N, 16)
    if SMALL < 32:
        x = merge(x, a, N, 32)
    return merge(x, a, N, 64)


@triton.jit
def parts_kernel(mixed, projected, a_log, dt_bias, segments, solve, weights, scales, count, COUNT: tl.constexpr,
                 HEADS: tl.constexpr, SMALL: tl.constexpr, PDL: tl.constexpr, KEY_HEADS: tl.constexpr,
                 VALUE_HEADS: tl.constexpr, HEAD: tl.constexpr, CHUNK: tl.constexpr):
    """grid: (value heads / HEADS, chunk numbers). Chunks are numbered from first / 64 + i on for segment i."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    CHANNELS: tl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * HEAD
    WIDTH: tl.constexpr = CHANNELS + VALUE_HEADS * HEAD + 2 * VALUE_HEADS
    if PDL:
        gdc_launch_dependents()
    head, chunk = tl.program_id(0) * HEADS, tl.program_id(1)
    i = tl.arange(0, COUNT)
    firsts = tl.load(segments + 4 * i, mask=i < count, other=1 << 30)
    index = tl.sum((firsts // CHUNK + i <= chunk).to(tl.int32), axis=0) - 1
    first, end = tl.load(segments + 4 * index), tl.load(segments + 4 * index + 1)
    first += (chunk - first // CHUNK - index) * CHUNK
    if PDL:
        gdc_wait()
    if first < end:
        t, d = tl.arange(0, CHUNK), tl.arange(0, HEAD)
        inside = first + t < end
        row = (first + t).to(tl.int64)
        at = mixed + row[:, None] * CHANNELS + head // GROUP * HEAD + d[None, :]
        q = tl.load(at, mask=inside[:, None], other=0.0)
        k = tl.load(at + KEY_HEADS * HEAD, mask=inside[:, None], other=0.0)
        qf, kf = q.to(tl.float32), k.to(tl.float32)
        c = tl.rsqrt(tl.sum(qf * qf, axis=1) + 1e-6) * (HEAD ** -0.5)
        a = tl.rsqrt(tl.sum(kf * kf, axis=1) + 1e-6)
        kk = tl.dot(k, tl.trans(k))
        qk = tl.dot(q, tl.trans(k))
        lower, strict = t[:, None] >= t[None, :], t[:, None] > t[None, :]
        for h in tl.static_range(HEADS):
            gates = projected + row * WIDTH + CHANNELS + VALUE_HEADS * HEAD + head + h
            x = tl.load(gates + VALUE_HEADS, mask=inside, other=0.0).to(tl.float32) + tl.load(dt_bias + head + h)
            beta = tl.sigmoid(tl.load(gates, mask=inside, other=0.0).to(tl.float32))
            beta = tl.where(inside, beta, 0.0)
            softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))
            log = tl.where(inside, -1.4426950408889634 * tl.exp(tl.load(a_log + head + h)) * softplus, 0.0)
            g = tl.cumsum(log, axis=0)
            last = tl.sum(log, axis=0)
            decay = tl.exp2(tl.minimum(g[:, None] - g[None, :], 0.0)) * a[None, :]
            part = (chunk * VALUE_HEADS + head + h).to(tl.int64)
            square = part * CHUNK * CHUNK + t[:, None] * CHUNK + t[None, :]
            x = tl.where(lower, qk * decay * c[:, None], 0.0)
            tl.store(weights + square, x.to(tl.bfloat16))
            x = tl.where(strict, kk * decay * (beta * a)[:, None], 0.0)
            x = invert(x, CHUNK, SMALL) * beta[None, :]
            tl.store(solve + square, x.to(tl.bfloat16))
            vector = scales + part * 4 * CHUNK + t
            tl.store(vector, tl.exp2(g) * a)
            tl.store(vector + CHUNK, tl.exp2(last - g) * a)
            tl.store(vector + 2 * CHUNK, tl.exp2(g) * c)
            tl.store(vector + 3 * CHUNK, tl.exp2(last + 0.0 * g))


@triton.jit
def walk_kernel(qk, values, solve, weights, scales, segments, states, out, before, news, ROWS: tl.constexpr,
                WIDE: tl.constexpr, READ: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
                KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, HEAD: tl.constexpr, CHUNK: tl.constexpr):
    """grid: (slices of ROWS rows of all heads' states, segments). WIDE: the rows are those of every product, so that
    its first operand is in registers; else tokens or elements of k are. READ: outputs, else what they need."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    SLICES: tl.constexpr = HEAD // ROWS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head, slice, i = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES, tl.program_id(1)
    first, end = tl.load(segments + 4 * i), tl.load(segments + 4 * i + 1)
    source, target = tl.load(segments + 4 * i + 2), tl.load(segments + 4 * i + 3)
    r, d, t = slice * ROWS + tl.arange(0, ROWS), tl.arange(0, HEAD), tl.arange(0, CHUNK)
    if WIDE:
        square = head * HEAD * HEAD + r[:, None] * HEAD + d[None, :]
        new = head * CHUNK * HEAD + t[None, :] * HEAD + r[:, None]
        token, column = t[None, :], head * HEAD + r[:, None]
    else:
        square = head * HEAD * HEAD + r[None, :] * HEAD + d[:, None]
        new = head * CHUNK * HEAD + t[:, None] * HEAD + r[None, :]
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
        if READ:
            q = qk.load([at, head // GROUP * HEAD])
            p = weights.load([part * CHUNK, 0])
            queries = tl.load(vector + 2 * CHUNK + t)
            if WIDE:
                o = tl.dot(n, tl.trans(p), queries[None, :] * tl.dot(b, tl.trans(q)))
            else:
                o = tl.dot(p, n, queries[:, None] * tl.dot(q, b))
            tl.store(out + (at + token).to(tl.int64) * (VALUE_HEADS * HEAD) + column, o, mask=at + token < end)
        else:
            chunk = (number + (at - first) // CHUNK).to(tl.int64)
            tl.store(before + chunk * SIZE + square, b)
            tl.store(news + chunk * (VALUE_HEADS * CHUNK * HEAD) + new, n)
        if WIDE:
            s = tl.dot(c, k, s * decay)
        else:
            s = tl.dot(tl.trans(k), c, s * decay)
    if target >= 0:
        tl.store(states + target.to(tl.int64) * SIZE + square, s)


@triton.jit
def read_kernel(qk, weights, scales, segments, before, news, out, count, COUNT: tl.constexpr, ROWS: tl.constexpr,
                PDL: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, HEAD: tl.constexpr,
                CHUNK: tl.constexpr):
    """grid: (slices of ROWS elements of v of all heads, chunk numbers)."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    if PDL:
        gdc_launch_dependents()
    head, slice, chunk = tl.program_id(0) // (HEAD // ROWS), tl.program_id(0) % (HEAD // ROWS), tl.program_id(1)
    i = tl.arange(0, COUNT)
    firsts = tl.load(segments + 4 * i, mask=i < count, other=1 << 30)
    index = tl.sum((firsts // CHUNK + i <= chunk).to(tl.int32), axis=0) - 1
    first, end = tl.load(segments + 4 * index), tl.load(segments + 4 * index + 1)
    first += (chunk - first // CHUNK - index) * CHUNK
    if PDL:
        gdc_wait()
    if first < end:
        part = chunk * VALUE_HEADS + head
        t, r = tl.arange(0, CHUNK), slice * ROWS + tl.arange(0, ROWS)
        q, p = qk.load([first, head // GROUP * HEAD]), weights.load([part * CHUNK, 0])
        s, n = before.load([part * HEAD + slice * ROWS, 0]), news.load([part * CHUNK, slice * ROWS])
        queries = tl.load(scales + part.to(tl.int64) * 4 * CHUNK + 2 * CHUNK + t)
        o = tl.dot(p, n, queries[:, None] * tl.dot(q, tl.trans(s)))
        to = out + (first + t).to(tl.int64)[:, None] * (VALUE_HEADS * HEAD) + head * HEAD + r[None, :]
        tl.store(to, o, mask=first + t[:, None] < end)


class Step:
    """Random operands of sequences of some lengths, each with a state in a slot of its own; the odd ones begin anew."""

    def __init__(self, lengths, scratch, shift=0.0, seed=1):
        torch.manual_seed(seed)
        heads, tokens, device = VALUE_HEADS, sum(lengths), scratch.device
        normal = lambda *shape: torch.randn(shape, device=device)
        self.mixed, self.projected = normal(tokens, CHANNELS).to(BF16), normal(tokens, WIDTH).to(BF16)
        self.a_log, self.dt_bias = 0.7 * normal(heads), 0.7 * normal(heads) + shift
        self.states = 0.25 * normal(len(lengths), heads, HEAD, HEAD)
        self.out = torch.full((tokens, heads * HEAD), float("nan"), device=device)
        ends = list(itertools.accumulate(lengths))
        self.cuts = [(e - n, e, NO_STATE if i % 2 else i, i) for i, (n, e) in enumerate(zip(lengths, ends))]
        self.segments = torch.tensor(self.cuts, dtype=torch.int32, device=device)
        self.chunks = tokens // CHUNK + len(lengths)
        self.scratch, self.tokens = scratch, tokens

    def parts(self, how):
        heads, small, warps, registers = how
        return parts_kernel, (VALUE_HEADS // heads, self.chunks), dict(
            mixed=self.mixed, projected=self.projected, a_log=self.a_log, dt_bias=self.dt_bias, segments=self.segments,
            solve=self.scratch.solve, weights=self.scratch.weights, scales=self.scratch.scales, count=len(self.cuts),
            COUNT=self.padded(), HEADS=heads, SMALL=small, num_warps=warps, maxnreg=registers)

    def walk(self, how):
        rows, wide, read, stages, warps = how
        s = self.scratch
        return walk_kernel, (VALUE_HEADS * HEAD // rows, len(self.cuts)), dict(
            qk=tile(self.mixed, CHUNK, HEAD), values=tile(self.mixed, CHUNK, rows), solve=tile(s.solve, CHUNK, CHUNK),
            weights=tile(s.weights, CHUNK, CHUNK), scales=s.scales, segments=self.segments, states=self.states,
            out=self.out, before=s.before, news=s.news, ROWS=rows, WIDE=wide, READ=read, STAGES=stages, num_warps=warps)

    def read(self, how):
        rows, warps = how
        s = self.scratch
        return read_kernel, (VALUE_HEADS * HEAD // rows, self.chunks), dict(
            qk=tile(self.mixed, CHUNK, HEAD), weights=tile(s.weights, CHUNK, CHUNK), scales=s.scales,
            segments=self.segments, before=tile(s.before, rows, HEAD), news=tile(s.news, CHUNK, rows), out=self.out,
            count=len(self.cuts), COUNT=self.padded(), ROWS=rows, num_warps=warps)

    def padded(self):
        return max(16, triton.next_power_of_2(len(self.cuts)))

    def kernels(self, parts, walk, read):
        return [self.parts(parts), self.walk(walk)] + ([] if walk[2] else [self.read(read)])


class Scratch:
    """What the kernels leave to each other, for `chunks` chunks."""

    def __init__(self, chunks, device):
        rows = chunks * VALUE_HEADS
        empty = lambda n, width, dtype: torch.empty((n, width), dtype=dtype, device=device)
        self.device = device
        self.solve, self.weights = empty(rows * CHUNK, CHUNK, BF16), empty(rows * CHUNK, CHUNK, BF16)
        self.scales = empty(rows * 4, CHUNK, F32)
        self.before, self.news = empty(rows * HEAD, HEAD, BF16), empty(rows * CHUNK, HEAD, BF16)


def tile(tensor, rows, columns):
    return TensorDescriptor.from_tensor(tensor, [rows, columns])


def options():
    launch = dict(launch_pdl=True) if PDL else {}
    return dict(PDL=PDL, KEY_HEADS=KEY_HEADS, VALUE_HEADS=VALUE_HEADS, HEAD=HEAD, CHUNK=CHUNK, **launch)


def launch(kernels):
    for kernel, grid, operands in kernels:
        kernel[grid](**operands, **options())


def recurrence(step):
    """The definition, token by token in f32: outputs and states."""
    heads, out, states = VALUE_HEADS, torch.empty_like(step.out), step.states.clone()
    mixed, projected = step.mixed.float(), step.projected.float()
    unit = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    q, k, v = mixed.split([KEY_HEADS * HEAD, KEY_HEADS * HEAD, heads * HEAD], dim=1)
    q, k = (unit(x.view(-1, KEY_HEADS, HEAD)).repeat_interleave(heads // KEY_HEADS, dim=1) for x in (q, k))
    v = v.view(-1, heads, HEAD)
    b, a = projected[:, -2 * heads:-heads], projected[:, -heads:]
    decay = torch.exp(-step.a_log.exp() * torch.nn.functional.softplus(a + step.dt_bias))
    beta = torch.sigmoid(b)
    for first, end, source, target in step.cuts:
        s = torch.zeros_like(states[0]) if source == NO_STATE else states[source].clone()
        for t in range(first, end):
            s *= decay[t, :, None, None]
            delta = beta[t, :, None] * (v[t] - (s * k[t, :, None, :]).sum(-1))
            s += delta[:, :, None] * k[t, :, None, :]
            out[t] = ((s * q[t, :, None, :]).sum(-1) * HEAD ** -0.5).view(-1)
        states[target] = s
    return out, states


def error(got, expected):
    """Mean and largest difference, relative to the mean and to the largest value."""
    difference = (got - expected).abs()
    return (difference.mean() / expected.abs().mean()).item(), (difference.max() / expected.abs().max()).item()


def check(step, expected, how):
    before = step.states.clone()
    step.out.fill_(float("nan"))
    launch(step.kernels(*how))
    errors = error(step.out, expected[0]) + error(step.states, expected[1])
    step.states.copy_(before)
    good = errors[0] < 6e-3 and errors[1] < 2e-2 and errors[2] < 6e-3 and errors[3] < 2e-2
    if not good:
        print(f"WRONG: {how}: {errors}")
    return good, errors


# Value heads a block, size of the blocks inverted first, warps, registers a thread.
PARTS = [(1, 16, 4, None), (1, 16, 4, 168), (1, 16, 8, None), (1, 32, 4, None), (2, 16, 8, None)]
# Rows of the state a block, whether they are those of the products, whether outputs, stages, warps.
WALKS = [(64, True, True, 1, 4), (64, True, True, 2, 4), (64, True, True, 3, 4), (128, True, True, 1, 8),
         (128, True, True, 2, 8), (32, True, True, 2, 4), (16, False, True, 2, 4), (16, False, True, 3, 4),
         (32, False, True, 2, 4), (32, False, True, 3, 4), (64, False, True, 2, 4), (64, False, True, 2, 8),
         (64, True, False, 2, 4), (64, True, False, 3, 4), (16, False, False, 3, 4), (16, False, False, 4, 4),
         (32, False, False, 3, 4), (32, False, False, 4, 4)]
READS = [(64, 4), (128, 4), (128, 8)]  # elements of v a block, warps
CASES = {"100": [100], "1k": [1024], "4k": [4096], "16k": [16384], "4 x 1k": [1024] * 4, "16 x 1k": [1024] * 16}


def microseconds(steps, kernels):
    """Of one step's `kernels`, in a chain of steps with operands that the L2 does not hold: median of graphs."""
    count = max(8, len(steps))
    launch(kernels(steps[0]))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            launch(kernels(steps[i % len(steps)]))
    graph.replay()
    times = []
    for _ in range(9):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times) * 1e3 / count


def compile_all(steps):
    kernels = [k for step in steps for k in [*map(step.parts, PARTS), *map(step.walk, WALKS), *map(step.read, READS)]]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
        for kernel, grid, operands in kernels:
            kernel.warmup(grid=grid, **operands, **options())


def check_all(device):
    lengths = [100, 1, 64, 130, 17, 200]
    step = Step(lengths, Scratch(sum(lengths) // CHUNK + len(lengths), device), shift=-2.0)
    compile_all([step])
    expected = recurrence(step)
    ways = [(p, WALKS[0], READS[0]) for p in PARTS] + [(PARTS[0], w, READS[0]) for w in WALKS]
    ways += [(PARTS[0], next(w for w in WALKS if not w[2]), r) for r in READS]
    results = [check(step, expected, way) for way in ways]
    worst = [max(e[i] for _, e in results) for i in range(4)]
    print("{} configurations: output off by {:.1e} on average, {:.1e} at most, state {:.1e}, {:.1e}".format(
        len(ways), *worst))
    return all(good for good, _ in results)


def measure(name, lengths, device, everything):
    tokens = sum(lengths)
    scratch = Scratch(tokens // CHUNK + len(lengths), device)
    size = tokens * (CHANNELS * 2 + VALUE_HEADS * HEAD * 4)
    steps = [Step(lengths, scratch, shift=-2.0, seed=i) for i in range(max(1, min(12, (260 << 20) // size)))]
    parts, walks, reads = ({how: microseconds(steps, lambda s: [kernel(s, how)]) for how in ways} for kernel, ways in (
        (Step.parts, PARTS), (Step.walk, WALKS), (Step.read, READS)))
    best = lambda times, read=None: min((how for how in times if read is None or how[2] == read), key=times.get)
    one, two = (best(parts), best(walks, True), None), (best(parts), best(walks, False), best(reads))
    times = [microseconds(steps, lambda s: s.kernels(*how)) for how in (one, two)]
    print(f"{name:8} {times[0]:7.1f} {times[1]:7.1f}   parts {parts[one[0]]:.1f} {one[0]}, walk {walks[one[1]]:.1f} {one[1]}"
          f"; walk {walks[two[1]]:.1f} {two[1]}, read {reads[two[2]]:.1f} {two[2]}", flush=True)
    if everything:
        for times in (parts, walks, reads):
            print("    " + ", ".join(f"{'/'.join(str(int(x or 0)) for x in how)} {t:.1f}" for how, t in times.items()))


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--all", action="store_true", help="print every configuration's time")
    everything = arguments.parse_args().all
    device = torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    if not check_all(device):
        raise SystemExit("wrong results")
    print("us a layer: with outputs in the walk, in a kernel of their own")
    for name, lengths in CASES.items():
        measure(name, lengths, device, everything)


if __name__ == "__main__":
    main()
