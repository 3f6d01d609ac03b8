//! Reference kernel of `ops::attention_gate`.

use super::isa::Isa;
use super::lanes::{Kernel, Lanes, dispatch};
use super::rows::per_task;
use super::sigmoid::sigmoid;
use crate::heads::HeadShape;
use half::bf16;
use pegainfer_core::team;

/// Reference kernel of `ops::attention_gate`.
pub fn run(isa: Isa, projected: &[bf16], shape: HeadShape, attended: &mut [bf16]) {
    let (width, columns) = (shape.q_width(), shape.gated_qkv_width());
    let tokens = per_task(6 * width);
    team::for_each_chunk(attended, tokens * width, |i, attended| {
        let projected = &projected[i * tokens * columns..][..attended.len() / width * columns];
        dispatch(isa, Tokens { projected, shape, attended });
    });
}

/// Computes some of the tokens of [`run`].
struct Tokens<'a> {
    projected: &'a [bf16],
    shape: HeadShape,
    attended: &'a mut [bf16],
}

impl Kernel for Tokens<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let Self { projected, shape, attended } = self;
        let rows = attended.chunks_exact_mut(shape.q_width()).zip(projected.chunks_exact(shape.gated_qkv_width()));
        for (attended, row) in rows {
            // Each head has its query, then its gate.
            let heads = row.chunks_exact(2 * shape.head_dim).map(|head| &head[shape.head_dim..]);
            for (x, gate) in attended.chunks_exact_mut(shape.head_dim).zip(heads) {
                for (x, gate) in x.as_chunks_mut().0.iter_mut().zip(gate.as_chunks().0) {
                    let product = s.mul(s.widen(x), sigmoid(s, s.widen(gate)));
                    s.narrow(product, x);
                }
            }
        }
    }
}
