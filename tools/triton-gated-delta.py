#!/usr/bin/env python3
"""Measures pegainfer-kernels/triton/gated_delta.py, the gated delta rule's prefill, against the recurrence and in time.

    python3 tools/triton-gated-delta.py                # checks, then a table of microseconds a layer
    python3 tools/triton-gated-delta.py --all          # also every configuration

Needs torch, Triton 3.6 and a Hopper GPU. The operands are those of ops::gated_delta_chunks, for Qwen3.5-4B's heads; each
sequence is one segment.
"""
import argparse
import concurrent.futures
import itertools
import os
import pathlib
import statistics
import sys

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "pegainfer-kernels/triton"))
from gated_delta import gated_delta_intra, gated_delta_scan

KEY_HEADS, VALUE_HEADS, HEAD, CHUNK = 16, 32, 128, 64
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * HEAD
WIDTH = CHANNELS + VALUE_HEADS * HEAD + 2 * VALUE_HEADS
NO_STATE = -1
BF16, F32 = torch.bfloat16, torch.float32


class Step:
    """Random operands of sequences of some lengths, each with a state in a slot of its own. shift: of the decays,
    which are slower below 0; alike: what tokens have in common; fresh: the odd sequences begin with this step."""

    def __init__(self, lengths, scratch, shift=-2.0, alike=0.0, fresh=False, seed=1):
        torch.manual_seed(seed)
        heads, tokens, device = VALUE_HEADS, sum(lengths), scratch.device
        normal = lambda *shape: torch.randn(shape, device=device)
        self.mixed = (normal(tokens, CHANNELS) + alike * normal(CHANNELS)).to(BF16)
        self.projected = normal(tokens, WIDTH).to(BF16)
        self.a_log, self.dt_bias = 0.7 * normal(heads), 0.7 * normal(heads) + shift
        self.states = 0.25 * normal(len(lengths), heads, HEAD, HEAD)
        self.out = torch.full((tokens, heads * HEAD), float("nan"), device=device)
        ends = list(itertools.accumulate(lengths))
        self.cuts = [(e - n, e, NO_STATE if fresh and i % 2 else i, i) for i, (n, e) in enumerate(zip(lengths, ends))]
        self.segments = torch.tensor(self.cuts, dtype=torch.int32, device=device)
        self.chunks = tokens // CHUNK + len(lengths)
        self.scratch, self.tokens = scratch, tokens

    def parts(self, how):
        warps, registers = how
        s = self.scratch
        return gated_delta_intra, (VALUE_HEADS, self.chunks), dict(
            qk=tile(self.mixed, CHUNK, HEAD), projected=self.projected, a_log=self.a_log, dt_bias=self.dt_bias,
            segments=self.segments, solve=tile(s.solve, CHUNK, CHUNK), weights=tile(s.weights, CHUNK, CHUNK),
            scales=s.scales, **self.sizes(), COUNT=self.padded(), num_warps=warps, maxnreg=registers)

    def scan(self, how):
        rows, wide, stages, warps = how
        s = self.scratch
        return gated_delta_scan, (VALUE_HEADS * HEAD // rows, len(self.cuts)), dict(
            qk=tile(self.mixed, CHUNK, HEAD), values=tile(self.mixed, CHUNK, rows), solve=tile(s.solve, CHUNK, CHUNK),
            weights=tile(s.weights, CHUNK, CHUNK), scales=s.scales, segments=self.segments, states=self.states,
            out=self.out, **self.sizes(), longest=0, ROWS=rows, WIDE=wide, STAGES=stages, num_warps=warps)

    def sizes(self):
        return dict(count=len(self.cuts), key_heads=KEY_HEADS, value_heads=VALUE_HEADS)

    def padded(self):
        return max(16, triton.next_power_of_2(len(self.cuts)))

    def kernels(self, parts, scan):
        return [self.parts(parts), self.scan(scan)]


class Scratch:
    """Intermediate tensors of the kernels, for `chunks` chunks."""

    def __init__(self, chunks, device):
        rows = chunks * VALUE_HEADS
        empty = lambda n, width, dtype: torch.empty((n, width), dtype=dtype, device=device)
        self.device = device
        self.solve, self.weights = empty(rows * CHUNK, CHUNK, BF16), empty(rows * CHUNK, CHUNK, BF16)
        self.scales = empty(rows * 4, CHUNK, F32)


def tile(tensor, rows, columns):
    return TensorDescriptor.from_tensor(tensor, [rows, columns])


def launch(kernels):
    for kernel, grid, operands in kernels:
        kernel[grid](**operands, launch_pdl=True)


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
    good = all(e < limit for e, limit in zip(errors, (5e-3, 1e-2) * 2))
    if not good:
        print(f"WRONG: {how}: {errors}")
    return good, errors


# Warps, registers a thread.
PARTS = [(4, None), (4, 128), (4, 104), (8, None)]
# Rows of the state a block, whether they are those of the GEMMs, stages, warps.
SCANS = [(64, True, 2, 4), (64, True, 3, 4), (128, True, 2, 8), (32, False, 2, 4), (32, False, 3, 4), (16, False, 2, 4)]
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
    kernels = [k for step in steps for k in [*map(step.parts, PARTS), *map(step.scan, SCANS)]]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
        for kernel, grid, operands in kernels:
            kernel.warmup(grid=grid, **operands, launch_pdl=True)


def check_all(device):
    lengths, good = [100, 1, 64, 130, 17, 500], True
    for shift, alike in ((-2.0, 0.0), (-5.0, 3.0)):
        step = Step(lengths, Scratch(sum(lengths) // CHUNK + len(lengths), device), shift, alike, fresh=True)
        compile_all([step])
        expected = recurrence(step)
        ways = [(p, SCANS[0]) for p in PARTS] + [(PARTS[0], w) for w in SCANS]
        results = [check(step, expected, way) for way in ways]
        good &= all(good for good, _ in results)
        worst = [max(errors[i] for _, errors in results) for i in range(4)]
        print("{} pairs, shift {}, alike {}: output off by {:.1e} on average, {:.1e} at most, state {:.1e}, {:.1e}".format(
            len(ways), shift, alike, *worst))
    return good


def measure(name, lengths, device, everything):
    tokens = sum(lengths)
    scratch = Scratch(tokens // CHUNK + len(lengths), device)
    size = tokens * (CHANNELS * 2 + VALUE_HEADS * HEAD * 4)
    steps = [Step(lengths, scratch, seed=i) for i in range(max(1, min(12, (260 << 20) // size)))]
    parts, scans = ({how: microseconds(steps, lambda s: [kernel(s, how)]) for how in ways} for kernel, ways in (
        (Step.parts, PARTS), (Step.scan, SCANS)))
    pairs = itertools.product(sorted(parts, key=parts.get)[:2], sorted(scans, key=scans.get)[:2])
    both, how = min(((microseconds(steps, lambda s: s.kernels(*pair)), pair) for pair in pairs), key=lambda x: x[0])
    print(f"{name:8} {parts[how[0]]:7.1f} {scans[how[1]]:7.1f} {both:7.1f}   {how[0]}, {how[1]}", flush=True)
    if everything:
        for times in (parts, scans):
            print("    " + ", ".join(f"{'/'.join(str(int(x or 0)) for x in how)} {t:.1f}" for how, t in times.items()))


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--all", action="store_true", help="print every configuration's time")
    everything = arguments.parse_args().all
    device = torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    if not check_all(device):
        raise SystemExit("wrong results")
    print("us a layer: parts, scan, both; configurations")
    for name, lengths in CASES.items():
        measure(name, lengths, device, everything)


if __name__ == "__main__":
    main()
