//! Reference kernel of `ops::deepseek_v4::{routed_experts, shared_expert}`.

use super::kv_quant::fp8;
use super::matmul::matmul;
use crate::cpu::isa::Isa;
use crate::cpu::weights::{BLOCK, Weights};

/// The three weights of one expert; experts are stacked along the rows.
#[derive(Clone, Copy)]
pub struct ExpertWeights<'a> {
    /// `[experts * width, hidden]`.
    pub gate: Weights<'a>,
    /// `[experts * width, hidden]`.
    pub up: Weights<'a>,
    /// `[experts * hidden, width]`.
    pub down: Weights<'a>,
    /// Number of the expert.
    pub number: usize,
}

/// Constants and roundings of an expert.
#[derive(Clone, Copy)]
pub struct Math {
    /// Upper bound of gate values, bound of the magnitude of up values.
    pub limit: f32,
    /// The input of `down` is rounded to FP8 if `down` is FP8 or FP4.
    pub quantize: bool,
    /// GEMM outputs are rounded to bf16.
    pub round: fn(&mut [f32]),
}

/// `down · (weight · silu(min(gate · x, limit)) · clamp(up · x, ±limit))` for each row; `x`: `[rows, hidden]`;
/// `weights`: `[rows]`; `shape`: `(hidden, width)`.
pub fn expert(
    isa: Isa,
    x: &[f32],
    weights: &[f32],
    expert: ExpertWeights<'_>,
    (hidden, width): (usize, usize),
    math: Math,
) -> Vec<f32> {
    let gemm = |x: &[f32], w: Weights<'_>, n: usize, k: usize| {
        let mut out = vec![0.0; x.len() / k * n];
        let rows = expert.number * n..(expert.number + 1) * n;
        matmul(isa, x, w, rows, k, &mut out);
        (math.round)(&mut out);
        out
    };
    let mut gate = gemm(x, expert.gate, width, hidden);
    let up = gemm(x, expert.up, width, hidden);
    for ((gate, up), weight) in gate.chunks_exact_mut(width).zip(up.chunks_exact(width)).zip(weights) {
        gate.iter_mut().zip(up).for_each(|(a, b)| {
            *a = weight * silu(a.min(math.limit)) * b.clamp(-math.limit, math.limit);
        });
    }
    (math.round)(&mut gate);
    if math.quantize && !matches!(expert.down, Weights::Bf16(_)) {
        fp8(&mut gate, BLOCK);
    }
    gemm(&gate, expert.down, hidden, width)
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}
