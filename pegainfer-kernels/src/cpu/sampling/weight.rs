//! Weights of tokens as integers.
//!
//! A weight is `2^exponent` in units of `2^-40`. Sums of integers do not depend on their order, and a weight is
//! computed by IEEE operations in a fixed order. Every CPU path and every GPU grid (csrc/rows/row.cuh has the same steps)
//! therefore gets the same sums, the same cut and the same token. The loss is a probability below 1e-12 for a single
//! token, and below 1e-7 for all tokens too light to count.

use crate::cpu::lanes::EXP2;

/// Bits of a weight after the point.
pub(super) const WEIGHT_BITS: u32 = 40;

/// Exponents up to this one give 0.
const NEGLIGIBLE: f32 = -42.0;

/// The weight of a logit: `exp((x - max) / temperature)`, so `2^40` for the largest.
pub(super) struct Weight {
    max: f32,
    /// `log2(e) / temperature`.
    scale: f32,
}

impl Weight {
    /// `scale`: `log2(e) / temperature`, finite and above 0.
    pub fn new(max: f32, scale: f32) -> Self {
        Self { max, scale }
    }

    /// The weight of `x`; 0 for NaN.
    pub fn of(&self, x: f32) -> u64 {
        let (high, low) = halves(self.exponent(x));
        join(u64::from(high), i64::from(low))
    }

    /// Sum of the weights of logits not less than `floor`; for at most 4096 logits.
    pub fn sum(&self, logits: &[f32], floor: f32) -> u64 {
        let (mut high, mut low) = ([0u32; 16], [0i32; 16]);
        let exponent = |x: f32| if x >= floor { self.exponent(x) } else { f32::NEG_INFINITY };
        let (rows, tail) = logits.as_chunks::<16>();
        for row in rows {
            for i in 0..16 {
                let (h, l) = halves(exponent(row[i]));
                high[i] += h;
                low[i] += l;
            }
        }
        let sum = join(high.iter().map(|&h| u64::from(h)).sum(), low.iter().map(|&l| i64::from(l)).sum());
        sum + tail.iter().filter(|&&x| x >= floor).map(|&x| self.of(x)).sum::<u64>()
    }

    /// The logit that weighs `weight`, as a fraction of the largest.
    pub fn logit(&self, weight: f64) -> f64 {
        f64::from(self.max) + weight.log2() / f64::from(self.scale)
    }

    /// Exponent to base 2. The largest logit gets 0 even if it is infinite or the scale is huge.
    #[inline(always)]
    fn exponent(&self, x: f32) -> f32 {
        if x == self.max { 0.0 } else { (x - self.max) * self.scale }
    }
}

/// The smallest whole number that is not below `fraction` (from 0 to 1) of `total`, at least 1.
pub(super) fn fraction_of(fraction: f32, total: u64) -> u64 {
    let fixed = (f64::from(fraction) * 2f64.powi(64)) as u64;
    let product = u128::from(fixed) * u128::from(total);
    let whole = (product >> 64) as u64 + u64::from(product as u64 != 0);
    whole.max(1)
}

/// `2^e` for `e <= 0`: multiples of `2^-20`, and the rest in units of `2^-40`; 0 for NaN. Plain multiplies and adds.
///
/// The exponential is that of `lanes::exp2`. Adding a number whose last bit is the unit rounds to a multiple of it.
#[inline(always)]
fn halves(e: f32) -> (u32, i32) {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
    const HIGH: f32 = 12.0; // 1.5 * 2^3, whose last bit is 2^-20
    const LOW: f32 = 1.5 / (1u32 << 17) as f32; // whose last bit is 2^-40
    let t = e + ROUND;
    let f = e - (t - ROUND);
    let p = EXP2[1..].iter().fold(EXP2[0], |p, c| p * f + c);
    let w = f32::from_bits(p.to_bits().wrapping_add(t.to_bits() << 23));
    let high = w + HIGH;
    let low = (w - (high - HIGH)) + LOW;
    let whole = (high.to_bits().wrapping_sub(HIGH.to_bits()), low.to_bits().wrapping_sub(LOW.to_bits()) as i32);
    if e > NEGLIGIBLE { whole } else { (0, 0) }
}

fn join(high: u64, low: i64) -> u64 {
    (high << (WEIGHT_BITS / 2)).wrapping_add_signed(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_powers_of_two_and_rise() {
        let weight = Weight::new(0.0, 1.0);
        assert_eq!(weight.of(0.0), 1 << WEIGHT_BITS);
        assert_eq!((weight.of(-42.0), weight.of(f32::NEG_INFINITY), weight.of(f32::NAN)), (0, 0, 0));
        let mut before = 0;
        for i in 0..50_000 {
            let e = -45.0 + i as f32 * 9e-4;
            let (got, exact) = (weight.of(e), f64::from(e).exp2() * 2f64.powi(40));
            assert!((got as f64 - exact).abs() <= 0.5 + 2.5e-7 * exact, "2^{e}: {got}, not {exact}");
            assert!(got >= before, "2^{e}");
            before = got;
        }
    }

    #[test]
    fn sums_are_sums() {
        let logits: Vec<f32> =
            (0..301).map(|i| if i % 50 == 7 { f32::NAN } else { (i * 37 % 101) as f32 * -0.3 }).collect();
        let weight = Weight::new(0.0, 1.3);
        for floor in [f32::NEG_INFINITY, -12.0, 0.0] {
            for n in [0, 5, 16, 64, 301] {
                let kept = logits[..n].iter().filter(|x| **x >= floor);
                assert_eq!(weight.sum(&logits[..n], floor), kept.map(|&x| weight.of(x)).sum::<u64>());
            }
        }
    }

    #[test]
    fn shares_round_up() {
        assert_eq!((fraction_of(0.5, 10), fraction_of(0.5, 11), fraction_of(1e-30, 10)), (5, 6, 1));
        assert_eq!(fraction_of(0.75, 1 << 40), 3 << 38);
        assert_eq!(fraction_of(0.9, 1000), 900, "0.9 in f32 is below 9/10");
    }
}
