//! CPU twin of `ops::linear_swiglu`.

use super::isa::Isa;
use super::lanes::{Binary, Kernel, Lanes, dispatch, exp2_sum, zip};
use super::rows::per_task;
use half::bf16;
use rayon::prelude::*;

/// See `ops::linear_swiglu`. `gate_up`: `[rows, 2 * width]`, `out`: `[rows, width]`.
pub fn swiglu(isa: Isa, gate_up: &[bf16], width: usize, out: &mut [bf16]) {
    let rows = per_task(3 * width * size_of::<bf16>());
    let parts = out.par_chunks_mut(rows * width).zip(gate_up.par_chunks(rows * 2 * width));
    parts.for_each(|(out, gate_up)| dispatch(isa, Rows { gate_up, width, out }));
}

/// Some rows of [`swiglu`].
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

/// `z / (1 + exp(-z))` for a `z` that was bf16, within 4e-7 of the value; -0 below -86.6, where less than 3e-36 is left.
///
/// With `e = exp(-|z|)`, which never overflows, this is `z / (1 + e)`, or `z e / (1 + e)` for a negative z. The
/// exponent in base 2 is `-|z| log2(e)`. Rounding it would cost the result five bits at z = -80, so log2(e) is cut in two: eight
/// bits of z times the sixteen of `HIGH` are exact in f32.
#[inline(always)]
fn silu<S: Lanes>(s: S, z: S::V) -> S::V {
    const HIGH: f32 = 47_274.0 / 32_768.0;
    const LOW: f32 = (std::f64::consts::LOG2_E - HIGH as f64) as f32;
    let size = s.max(z, s.sub(s.splat(0.0), z));
    let e = exp2_sum(s, s.mul(size, s.splat(-HIGH)), s.mul(size, s.splat(-LOW)));
    s.div(s.where_below(z, 0.0, s.mul(z, e), z), s.add(s.splat(1.0), e))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Silu([f32; 16]);

    impl Kernel for Silu {
        type Out = [f32; 16];

        #[inline(always)]
        fn run<S: Lanes>(mut self, s: S) -> [f32; 16] {
            s.store(silu(s, s.load(&self.0)), &mut self.0);
            self.0
        }
    }

    #[test]
    fn silu_is_accurate_for_every_bf16_and_saturates() {
        for isa in Isa::available() {
            for first in (0..=u16::MAX).step_by(16) {
                let z: [f32; 16] = std::array::from_fn(|i| bf16::from_bits(first + i as u16).to_f32());
                for (z, got) in z.into_iter().zip(dispatch(isa, Silu(z))) {
                    let (exact, got) = (f64::from(z) / (1.0 + (-f64::from(z)).exp()), f64::from(got));
                    match z {
                        f32::NEG_INFINITY => assert!(got.is_nan(), "as the formula"),
                        _ if z.is_nan() => assert!(got.is_nan()),
                        f32::INFINITY => assert_eq!(got, exact),
                        ..-86.0 => assert!((got - exact).abs() < 4e-36, "{isa} {z:e}: {got:e} {exact:e}"),
                        _ => assert!((got - exact).abs() <= 4e-7 * exact.abs(), "{isa} {z:e}: {got:e} {exact:e}"),
                    }
                }
            }
        }
    }
}
