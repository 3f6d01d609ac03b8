//! Reference kernel of `ops::moe::experts`.

use crate::cpu::isa::Isa;
use crate::cpu::lanes::{Binary, Kernel, Lanes, dispatch, zip};
use crate::cpu::linear::{Activations, LinearOut, Scratch, linear_stacked};
use crate::cpu::rows::per_task;
use crate::cpu::sigmoid::silu;
use crate::cpu::weights::Weights;
use half::bf16;
use pegainfer_core::team;

/// The matrices of one expert.
pub struct Expert<'a> {
    /// Gate, then up, `[2 * width, hidden]`.
    pub gate_up: Weights<'a>,
    /// `[hidden, width]`.
    pub down: Weights<'a>,
    /// Columns of `gate_up`.
    pub hidden: usize,
    /// Columns of `down`.
    pub width: usize,
}

impl Expert<'_> {
    /// The expert's output for some rows, `[n, hidden]`; `x`: `[n, hidden]`; `weights`: `[n]`.
    pub fn run(
        &self,
        (isa, activations): (Isa, Activations),
        x: &[bf16],
        weights: &[f32],
        scratch: &mut Scratch,
    ) -> Vec<bf16> {
        let (rows, hidden, width) = (weights.len(), self.hidden, self.width);
        let mut gemm = |x: &[bf16], w: Weights<'_>, n: usize, k: usize| {
            let mut out = vec![bf16::ZERO; rows * n];
            linear_stacked((isa, activations), x, &[w], (rows, k), LinearOut::Bf16(&mut out), scratch);
            out
        };
        let gate_up = gemm(x, self.gate_up, 2 * width, hidden);
        let mut gated = vec![bf16::ZERO; rows * width];
        let part = per_task(3 * width * size_of::<bf16>());
        team::for_each_chunk(&mut gated, part * width, |i, out| {
            let (gate_up, weights) = (&gate_up[2 * i * part * width..], &weights[i * part..]);
            dispatch(isa, Rows { gate_up, weights, width, out });
        });
        gemm(&gated, self.down, hidden, width)
    }
}

/// `out = weight · silu(gate) · up` for each row.
struct Rows<'a> {
    gate_up: &'a [bf16],
    weights: &'a [f32],
    width: usize,
    out: &'a mut [bf16],
}

impl Kernel for Rows<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let rows = self.gate_up.chunks_exact(2 * self.width).zip(self.weights);
        for (out, (row, weight)) in self.out.chunks_exact_mut(self.width).zip(rows) {
            let (gate, up) = row.split_at(self.width);
            zip(s, Gated { weight: *weight }, gate, up, out);
        }
    }
}

/// `weight · silu(z) · up`, rounded once.
#[derive(Clone, Copy)]
struct Gated {
    weight: f32,
}

impl Binary for Gated {
    #[inline(always)]
    fn apply<S: Lanes>(self, s: S, z: S::V, up: S::V) -> S::V {
        s.mul(s.mul(s.splat(self.weight), silu(s, z)), up)
    }
}
