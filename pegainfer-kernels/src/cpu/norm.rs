//! Reference kernels of `ops::rms_norm`, `ops::add_rms_norm` and the norm of `ops::linear_add_norm`.

use super::isa::Isa;
use super::lanes::{Binary, Kernel, Lanes, dispatch, padded, zip};
use super::rows::per_task;
use half::bf16;
use pegainfer_core::team;
use pegainfer_core::tensor::{DType, Tensor};

/// Weight of a norm, `[hidden]`; its type selects the rounding, see `ops::rms_norm`.
#[derive(Clone, Copy)]
pub enum NormWeight<'a> {
    /// The normalised value is rounded before it is multiplied by the weight, and the result once more.
    Bf16(&'a [bf16]),
    /// Only the result is rounded.
    F32(&'a [f32]),
}

impl<'a> NormWeight<'a> {
    /// A tensor of either type.
    pub fn of(tensor: &'a Tensor) -> Self {
        match tensor.dtype() {
            DType::F32 => Self::F32(tensor.host()),
            _ => Self::Bf16(tensor.host()),
        }
    }

    fn len(self) -> usize {
        match self {
            Self::Bf16(weight) => weight.len(),
            Self::F32(weight) => weight.len(),
        }
    }
}

/// Reference kernel of `ops::rms_norm`.
pub fn rms_norm(isa: Isa, x: &[bf16], weight: NormWeight<'_>, eps: f32, out: &mut [bf16]) {
    let part = weight.len() * per_task(2 * size_of::<bf16>() * weight.len());
    team::for_each_chunk(out, part, |i, out| {
        dispatch(isa, Norm { x: &x[i * part..][..out.len()], weight, eps, out });
    });
}

/// Reference kernel of `ops::add_rms_norm` and of the norm in `ops::linear_add_norm`.
pub fn add_rms_norm(isa: Isa, x: &[bf16], residual: &mut [bf16], weight: NormWeight<'_>, eps: f32, out: &mut [bf16]) {
    let part = weight.len() * per_task(4 * size_of::<bf16>() * weight.len());
    team::for_each_chunk_pair((out, part), (residual, part), |i, out, residual| {
        dispatch(isa, AddNorm { x: &x[i * part..][..out.len()], residual, weight, eps, out });
    });
}

/// Computes some of the rows of [`rms_norm`].
struct Norm<'a> {
    x: &'a [bf16],
    weight: NormWeight<'a>,
    eps: f32,
    out: &'a mut [bf16],
}

impl Kernel for Norm<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let hidden = self.weight.len();
        for (out, x) in self.out.chunks_exact_mut(hidden).zip(self.x.chunks_exact(hidden)) {
            norm_row(s, x, self.weight, self.eps, out);
        }
    }
}

/// Computes some of the rows of [`add_rms_norm`].
struct AddNorm<'a> {
    x: &'a [bf16],
    residual: &'a mut [bf16],
    weight: NormWeight<'a>,
    eps: f32,
    out: &'a mut [bf16],
}

impl Kernel for AddNorm<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let hidden = self.weight.len();
        let rows = self.out.chunks_exact_mut(hidden).zip(self.residual.chunks_exact_mut(hidden));
        for ((out, residual), x) in rows.zip(self.x.chunks_exact(hidden)) {
            zip(s, Add, residual, x, out);
            residual.copy_from_slice(out);
            norm_row(s, residual, self.weight, self.eps, out);
        }
    }
}

/// `a + b`.
#[derive(Clone, Copy)]
struct Add;

impl Binary for Add {
    #[inline(always)]
    fn apply<S: Lanes>(self, s: S, a: S::V, b: S::V) -> S::V {
        s.add(a, b)
    }
}

/// `bf16(x * scale) * weight`, the scale being that of the row.
#[derive(Clone, Copy)]
pub(super) struct Scale(f32);

impl Scale {
    /// `rsqrt(mean(x²) + eps)`, in f32.
    #[inline(always)]
    pub(super) fn of_row<S: Lanes>(s: S, x: &[bf16], eps: f32) -> Self {
        let mean = sum_of_squares(s, x) / x.len() as f32;
        Self((mean + eps).sqrt().recip())
    }

    /// `x * scale * weight`, not rounded in between.
    #[inline(always)]
    pub(super) fn exact<S: Lanes>(self, s: S, x: S::V, weight: S::V) -> S::V {
        s.mul(s.mul(x, s.splat(self.0)), weight)
    }
}

impl Binary for Scale {
    #[inline(always)]
    fn apply<S: Lanes>(self, s: S, x: S::V, weight: S::V) -> S::V {
        s.mul(s.round(s.mul(x, s.splat(self.0))), weight)
    }
}

/// One row: `out = x * rsqrt(mean(x²) + eps) * weight`.
#[inline(always)]
fn norm_row<S: Lanes>(s: S, x: &[bf16], weight: NormWeight<'_>, eps: f32, out: &mut [bf16]) {
    let scale = Scale::of_row(s, x, eps);
    match weight {
        NormWeight::Bf16(weight) => zip(s, scale, x, weight, out),
        NormWeight::F32(weight) => scale_row(s, scale, x, weight, out),
    }
}

/// `out = bf16(x * scale * weight)`.
#[inline(always)]
fn scale_row<S: Lanes>(s: S, scale: Scale, x: &[bf16], weight: &[f32], out: &mut [bf16]) {
    assert!(x.len() == out.len() && weight.len() == out.len());
    let ((x, x_tail), (weight, weight_tail)) = (x.as_chunks(), weight.as_chunks());
    let (out, out_tail) = out.as_chunks_mut();
    for ((x, weight), out) in x.iter().zip(weight).zip(out) {
        s.narrow(scale.exact(s, s.widen(x), s.load(weight)), out);
    }
    if !out_tail.is_empty() {
        let mut last = [bf16::ZERO; 16];
        s.narrow(scale.exact(s, s.widen(&padded(x_tail)), s.load(&padded(weight_tail))), &mut last);
        out_tail.copy_from_slice(&last[..out_tail.len()]);
    }
}

/// `Σ x²` in f32, in sixty-four partial sums on every path, so that the order of summation depends only on the length.
#[inline(always)]
fn sum_of_squares<S: Lanes>(s: S, x: &[bf16]) -> f32 {
    let mut sums = [s.splat(0.0); 4];
    let (groups, rest) = x.as_chunks::<64>();
    for group in groups {
        for (sum, x) in sums.iter_mut().zip(group.as_chunks().0) {
            let x = s.widen(x);
            *sum = s.fma(x, x, *sum);
        }
    }
    let (vectors, tail) = rest.as_chunks();
    for (i, sum) in sums.iter_mut().enumerate() {
        // Not a zip, whose variable length would keep the sums in memory.
        if let Some(x) = vectors.get(i) {
            let x = s.widen(x);
            *sum = s.fma(x, x, *sum);
        }
    }
    if !tail.is_empty() {
        let x = s.widen(&padded(tail));
        sums[0] = s.fma(x, x, sums[0]);
    }
    s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])))
}
