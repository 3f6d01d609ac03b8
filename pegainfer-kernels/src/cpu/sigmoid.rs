//! The logistic function and SiLU, lane by lane.

use super::lanes::{Lanes, exp2_sum};

/// `z / (1 + exp(-z))`, within 4e-7 of the value for a `z` converted from bf16 (a few times that for others); -0 below
/// -86.6, where the value is below 3e-36.
///
/// With `e = exp(-|z|)`, which never overflows, this is `z / (1 + e)`, or `z e / (1 + e)` for a negative z.
#[inline(always)]
pub(super) fn silu<S: Lanes>(s: S, z: S::V) -> S::V {
    let e = exp_minus_abs(s, z);
    s.div(s.where_below(z, 0.0, s.mul(z, e), z), s.add(s.splat(1.0), e))
}

/// `1 / (1 + exp(-z))`, as accurate as [`silu`]; 0 below -86.6.
#[inline(always)]
pub(super) fn sigmoid<S: Lanes>(s: S, z: S::V) -> S::V {
    let e = exp_minus_abs(s, z);
    s.div(s.where_below(z, 0.0, e, s.splat(1.0)), s.add(s.splat(1.0), e))
}

/// `exp(-|z|)`. The exponent in base 2 is `-|z| log2(e)`. Rounding it would cost the result five bits at z = -80, so
/// log2(e) is cut in two: eight bits of z times the sixteen of `HIGH` are exact in f32.
#[inline(always)]
fn exp_minus_abs<S: Lanes>(s: S, z: S::V) -> S::V {
    const HIGH: f32 = 47_274.0 / 32_768.0;
    const LOW: f32 = (std::f64::consts::LOG2_E - HIGH as f64) as f32;
    let size = s.max(z, s.sub(s.splat(0.0), z));
    exp2_sum(s, s.mul(size, s.splat(-HIGH)), s.mul(size, s.splat(-LOW)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Isa;
    use crate::cpu::lanes::{Kernel, dispatch};
    use half::bf16;

    struct Silu([f32; 16]);

    impl Kernel for Silu {
        type Out = [f32; 16];

        #[inline(always)]
        fn run<S: Lanes>(mut self, s: S) -> [f32; 16] {
            s.store(silu(s, s.load(&self.0)), &mut self.0);
            self.0
        }
    }

    struct Sigmoid([f32; 16]);

    impl Kernel for Sigmoid {
        type Out = [f32; 16];

        #[inline(always)]
        fn run<S: Lanes>(mut self, s: S) -> [f32; 16] {
            s.store(sigmoid(s, s.load(&self.0)), &mut self.0);
            self.0
        }
    }

    #[test]
    fn sigmoid_is_accurate_for_every_bf16_and_saturates() {
        for isa in Isa::available() {
            for first in (0..=u16::MAX).step_by(16) {
                let z: [f32; 16] = std::array::from_fn(|i| bf16::from_bits(first + i as u16).to_f32());
                for (z, got) in z.into_iter().zip(dispatch(isa, Sigmoid(z))) {
                    let (exact, got) = (1.0 / (1.0 + (-f64::from(z)).exp()), f64::from(got));
                    match z {
                        _ if z.is_nan() => assert!(got.is_nan()),
                        ..-86.0 => assert!((got - exact).abs() < 1e-37, "{isa} {z:e}: {got:e} {exact:e}"),
                        _ => assert!((got - exact).abs() <= 4e-7 * exact, "{isa} {z:e}: {got:e} {exact:e}"),
                    }
                }
            }
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
