//! Reference kernel of `ops::gated_rms_norm`.

use super::isa::Isa;
use super::lanes::{Kernel, Lanes, dispatch};
use super::rows::per_task;
use super::sigmoid::silu;
use crate::delta::DeltaShape;
use half::bf16;
use pegainfer_core::team;

/// Read-only operands; see the op.
pub struct Inputs<'a> {
    /// `[tokens, v_width]`.
    pub x: &'a [f32],
    /// `[tokens, projected_width]`.
    pub projected: &'a [bf16],
    /// `[value_dim]`.
    pub weight: &'a [f32],
    /// Head counts and sizes.
    pub shape: DeltaShape,
    /// Epsilon of the norm.
    pub eps: f32,
}

/// Reference kernel of `ops::gated_rms_norm`.
pub fn run(isa: Isa, inputs: &Inputs<'_>, out: &mut [bf16]) {
    let width = inputs.shape.v_width();
    let tokens = per_task(8 * width);
    team::for_each_chunk(out, tokens * width, |part, out| {
        dispatch(isa, Tokens { inputs, first: part * tokens, out });
    });
}

/// The tokens of [`run`] with rows in `out`.
struct Tokens<'a> {
    inputs: &'a Inputs<'a>,
    first: usize,
    out: &'a mut [bf16],
}

impl Kernel for Tokens<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let Inputs { x, projected, weight, shape, eps } = *self.inputs;
        let (width, dim, [z, ..]) = (shape.v_width(), shape.value_dim, shape.gates());
        for (t, out) in (self.first..).zip(self.out.chunks_exact_mut(width)) {
            let gate = &projected[t * shape.projected_width() + z..][..width];
            let heads = x[t * width..][..width].chunks_exact(dim).zip(gate.chunks_exact(dim));
            for (h, (x, z)) in heads.enumerate() {
                head(s, x, z, weight, eps, &mut out[shape.output_head(h) * dim..][..dim]);
            }
        }
    }
}

/// One head: `out = x * rsqrt(mean(x²) + eps) * weight * silu(z)`.
#[inline(always)]
fn head<S: Lanes>(s: S, x: &[f32], z: &[bf16], weight: &[f32], eps: f32, out: &mut [bf16]) {
    let mut squares = s.splat(0.0);
    for x in x.as_chunks().0 {
        squares = s.fma(s.load(x), s.load(x), squares);
    }
    let scale = s.splat((s.sum(squares) / x.len() as f32 + eps).sqrt().recip());
    let operands = x.as_chunks().0.iter().zip(z.as_chunks().0).zip(weight.as_chunks().0);
    for (((x, z), weight), out) in operands.zip(out.as_chunks_mut().0) {
        let normed = s.mul(s.mul(s.load(x), scale), s.load(weight));
        s.narrow(s.mul(normed, silu(s, s.widen(z))), out);
    }
}
