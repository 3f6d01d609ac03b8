//! Reference kernel of `ops::vision::layer_norm`.

use super::values::{Value, load, load_f32, store};
use crate::cpu::isa::Isa;
use crate::cpu::lanes::{Kernel, Lanes, dispatch};
use crate::cpu::rows::per_task;
use pegainfer_core::team;

/// Reference kernel of `ops::vision::layer_norm`; `weight` and `bias` have the width of a row.
pub fn layer_norm<T: Value>(isa: Isa, x: &[T], (weight, bias): (&[f32], &[f32]), eps: f32, out: &mut [T]) {
    let part = weight.len() * per_task(2 * size_of::<T>() * weight.len());
    team::for_each_chunk(out, part, |i, out| {
        dispatch(isa, Rows { x: &x[i * part..][..out.len()], weight, bias, eps, out });
    });
}

/// Computes some of the rows of [`layer_norm`].
struct Rows<'a, T> {
    x: &'a [T],
    weight: &'a [f32],
    bias: &'a [f32],
    eps: f32,
    out: &'a mut [T],
}

impl<T: Value> Kernel for Rows<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let hidden = self.weight.len();
        for (x, out) in self.x.chunks_exact(hidden).zip(self.out.chunks_exact_mut(hidden)) {
            let mean = total(s, x, |v| v) / hidden as f32;
            let squares = total(s, x, |v| {
                let d = s.sub(v, s.splat(mean));
                s.mul(d, d)
            });
            let scale = (squares / hidden as f32 + self.eps).sqrt().recip();
            let parameters = self.weight.chunks(16).zip(self.bias.chunks(16));
            for ((x, (w, b)), out) in x.chunks(16).zip(parameters).zip(out.chunks_mut(16)) {
                let normed = s.mul(s.sub(load(s, x), s.splat(mean)), s.splat(scale));
                store(s, s.fma(normed, load_f32(s, w), load_f32(s, b)), out);
            }
        }
    }
}

/// `Σ f(x)` in sixteen partial sums, so that the order of summation depends only on the length.
#[inline(always)]
fn total<S: Lanes, T: Value>(s: S, x: &[T], f: impl Fn(S::V) -> S::V) -> f32 {
    let mut sum = s.splat(0.0);
    for x in x.chunks(16) {
        sum = s.add(sum, s.first(f(load(s, x)), x.len(), 0.0));
    }
    s.sum(sum)
}
