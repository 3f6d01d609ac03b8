//! Reference kernels of `ops::vision::add_bias`, `ops::vision::add_bias_residual` and `ops::vision::bias_gelu`.

use super::values::{Value, load, load_f32, store};
use crate::cpu::isa::Isa;
use crate::cpu::lanes::{Kernel, Lanes, dispatch, exp2};
use crate::cpu::rows::per_task;
use crate::cpu::sigmoid::sigmoid;
use pegainfer_core::team;
use std::f32::consts::{FRAC_1_SQRT_2, LOG2_E};

/// What follows the sum of a GEMM and its bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// The sum replaces the output.
    Store,
    /// The sum is added to the output.
    Add,
    /// GELU by its approximation with tanh.
    GeluTanh,
    /// GELU by the error function.
    GeluErf,
}

/// `out = after(x + bias)`; `bias` has the width of a row.
pub fn bias<T: Value>(isa: Isa, x: &[f32], bias: &[f32], after: After, out: &mut [T]) {
    let part = bias.len() * per_task((size_of::<f32>() + 2 * size_of::<T>()) * bias.len());
    team::for_each_chunk(out, part, |i, out| {
        dispatch(isa, Rows { x: &x[i * part..][..out.len()], bias, after, out });
    });
}

/// Computes some of the rows of [`bias`].
struct Rows<'a, T> {
    x: &'a [f32],
    bias: &'a [f32],
    after: After,
    out: &'a mut [T],
}

impl<T: Value> Kernel for Rows<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let width = self.bias.len();
        for (x, out) in self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width)) {
            for ((x, b), out) in x.chunks(16).zip(self.bias.chunks(16)).zip(out.chunks_mut(16)) {
                let sum = s.add(load_f32(s, x), load_f32(s, b));
                let result = match self.after {
                    After::Store => sum,
                    After::Add => s.add(load(s, out), sum),
                    After::GeluTanh => gelu_tanh(s, sum),
                    After::GeluErf => gelu_erf(s, sum),
                };
                store(s, result, out);
            }
        }
    }
}

/// `x/2 (1 + tanh u) = x sigmoid(2 u)` with `u = sqrt(2/π) (x + 0.044715 x³)`.
#[inline(always)]
fn gelu_tanh<S: Lanes>(s: S, x: S::V) -> S::V {
    const TWICE_ROOT: f32 = 1.595_769; // 2 sqrt(2 / π)
    let cubic = s.fma(s.mul(s.mul(x, x), s.splat(0.044_715)), x, x);
    s.mul(x, sigmoid(s, s.mul(cubic, s.splat(TWICE_ROOT))))
}

/// `x/2 (1 + erf(x / sqrt 2))`, within 2e-7 times the larger of 1 and `|x|`: the rational approximation of the
/// complementary error function, Abramowitz and Stegun 7.1.26.
#[inline(always)]
fn gelu_erf<S: Lanes>(s: S, x: S::V) -> S::V {
    const P: f32 = 0.327_591_1;
    const A: [f32; 5] = [1.061_405_4, -1.453_152_1, 1.421_413_8, -0.284_496_72, 0.254_829_6];
    let size = s.max(x, s.sub(s.splat(0.0), x));
    let z = s.mul(size, s.splat(FRAC_1_SQRT_2));
    let t = s.div(s.splat(1.0), s.fma(z, s.splat(P), s.splat(1.0)));
    let mut polynomial = s.splat(A[0]);
    for a in &A[1..] {
        polynomial = s.fma(polynomial, t, s.splat(*a));
    }
    let exponential = exp2(s, s.mul(s.mul(z, z), s.splat(-LOG2_E)));
    // erfc(|x| / sqrt 2) / 2, the weight of the smaller side.
    let tail = s.mul(s.mul(polynomial, t), s.mul(exponential, s.splat(0.5)));
    s.mul(x, s.where_below(x, 0.0, tail, s.sub(s.splat(1.0), tail)))
}
