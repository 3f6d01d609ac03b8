//! Reference kernel of `ops::deepseek_v4::{hyper_mix, hyper_merge, hyper_head}`.

use super::matmul::dot;
use super::norm::inverse_rms;
use crate::cpu::isa::Isa;
use crate::cpu::lanes::{Kernel, Lanes, dispatch};

/// Residual streams.
pub const STREAMS: usize = 4;
/// Mixing values of a token: 4 for the input, 4 for the output, 4 x 4 between the streams.
pub const MIXES: usize = 2 * STREAMS + STREAMS * STREAMS;

/// `m[i] = (function[i] · x) * rsqrt(mean(x²) + eps)`; `function`: `[m.len(), x.len()]` f32, a multiple of 32 wide.
pub fn mixes(isa: Isa, x: &[f32], function: &[f32], eps: f32, m: &mut [f32]) {
    let scale = inverse_rms(x, eps);
    for (m, row) in m.iter_mut().zip(function.chunks_exact(x.len())) {
        *m = dispatch(isa, Dot(x, row)) * scale;
    }
}

struct Dot<'a>(&'a [f32], &'a [f32]);

impl Kernel for Dot<'_> {
    type Out = f32;

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) -> f32 {
        dot(s, self.0, self.1)
    }
}

/// The weights of the streams in the input of a block: `sigmoid(m * scale + base) + eps`.
pub fn input_weight(m: f32, scale: f32, base: f32, eps: f32) -> f32 {
    sigmoid(m * scale + base) + eps
}

/// Weight of a block's output in each stream: `2 sigmoid(m * scale + base)`.
pub fn output_weight(m: f32, scale: f32, base: f32) -> f32 {
    2.0 * sigmoid(m * scale + base)
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Makes `c[j][k]` doubly stochastic: softmax over `k`, then columns and rows divided by their sums in turn, columns
/// `iters` times and last. `eps` is added to the softmax and to every sum.
pub fn sinkhorn(c: &mut [f32], iters: usize, eps: f32) {
    for row in c.chunks_exact_mut(STREAMS) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter_mut().for_each(|v| *v = (*v - max).exp());
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|v| *v = *v / sum + eps);
    }
    for i in 0..iters {
        if i > 0 {
            for row in c.chunks_exact_mut(STREAMS) {
                let sum = row.iter().sum::<f32>() + eps;
                row.iter_mut().for_each(|v| *v /= sum);
            }
        }
        for k in 0..STREAMS {
            let sum = (0..STREAMS).map(|j| c[j * STREAMS + k]).sum::<f32>() + eps;
            (0..STREAMS).for_each(|j| c[j * STREAMS + k] /= sum);
        }
    }
}

/// `out = Σ_j weights[j] · streams[j]`; `streams`: `[4, hidden]`.
pub fn weighted_sum(streams: &[f32], weights: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for (stream, weight) in streams.chunks_exact(out.len()).zip(weights) {
        out.iter_mut().zip(stream).for_each(|(out, x)| *out += weight * x);
    }
}

/// `streams'[k] = post[k] · f + Σ_j comb[j][k] · streams[j]`: the sum runs over the first index.
pub fn merge(streams: &mut [f32], f: &[f32], post: &[f32], comb: &[f32]) {
    let hidden = f.len();
    for (i, f) in f.iter().enumerate() {
        let old: [f32; STREAMS] = std::array::from_fn(|j| streams[j * hidden + i]);
        for k in 0..STREAMS {
            let mixed: f32 = (0..STREAMS).map(|j| comb[j * STREAMS + k] * old[j]).sum();
            streams[k * hidden + i] = post[k] * f + mixed;
        }
    }
}
