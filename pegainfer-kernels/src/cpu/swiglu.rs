//! Reference kernel of `ops::linear_swiglu`.

use super::isa::Isa;
use super::lanes::{Binary, Kernel, Lanes, dispatch, zip};
use super::rows::per_task;
use super::sigmoid::silu;
use half::bf16;
use pegainfer_core::team;

/// Reference kernel of the gate in `ops::linear_swiglu`. `gate_up`: `[rows, 2 * width]`, `out`: `[rows, width]`.
pub fn swiglu(isa: Isa, gate_up: &[bf16], width: usize, out: &mut [bf16]) {
    let rows = per_task(3 * width * size_of::<bf16>());
    team::for_each_chunk(out, (rows * width).max(1), |i, out| {
        let gate_up = &gate_up[2 * i * rows * width..][..2 * out.len()];
        dispatch(isa, Rows { gate_up, width, out });
    });
}

/// Computes some of the rows of [`swiglu`].
struct Rows<'a> {
    gate_up: &'a [bf16],
    width: usize,
    out: &'a mut [bf16],
}

impl Kernel for Rows<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        for (out, row) in self.out.chunks_exact_mut(self.width).zip(self.gate_up.chunks_exact(2 * self.width)) {
            let (gate, up) = row.split_at(self.width);
            zip(s, SwiGlu, gate, up, out);
        }
    }
}

/// `bf16(silu(z)) * up` for a `z` that was bf16.
#[derive(Clone, Copy)]
struct SwiGlu;

impl Binary for SwiGlu {
    #[inline(always)]
    fn apply<S: Lanes>(self, s: S, z: S::V, up: S::V) -> S::V {
        s.mul(s.round(silu(s, z)), up)
    }
}
