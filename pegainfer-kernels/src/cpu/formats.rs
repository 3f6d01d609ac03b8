//! FP8 e4m3, FP4 E2M1 and E8M0: decoding, and rounding to them. All exact or round-to-nearest-even.

pub use pegainfer_core::small_floats::{decode_e4m3, e2m1, e4m3, e8m0};

/// Largest e4m3 value.
pub const E4M3_MAX: f32 = 448.0;
/// Largest E2M1 value.
pub const E2M1_MAX: f32 = 6.0;

/// The e4m3 byte nearest to `x`, ties to even, saturating at 448. Loops over it are vectorised.
#[inline(always)]
pub fn encode_e4m3(x: f32) -> u8 {
    let magnitude = x.abs().min(E4M3_MAX);
    let bits = magnitude.to_bits();
    // Round the 20 lower bits away, then move the bias from 127 to 7.
    let normal = ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
    // Added to 2^14, whose last bit is 2^-9, a subnormal is rounded to a multiple of 2^-9 and is in the last bits.
    let subnormal = (magnitude + power_of_two(14)).to_bits() & 0xff;
    let code = if magnitude < power_of_two(-6) { subnormal } else { normal };
    code as u8 | (x.to_bits() >> 24) as u8 & 0x80
}

/// `x` rounded to the nearest e4m3 value, ties to even, saturating at 448.
pub fn round_e4m3(x: f32) -> f32 {
    let x = x.clamp(-E4M3_MAX, E4M3_MAX);
    // Below 2^-6 the spacing stays that of subnormals.
    let spacing = power_of_two(exponent(x).max(-6) - 3);
    (x / spacing).round_ties_even() * spacing
}

/// `x` rounded to the nearest E2M1 value, ties to even, saturating at 6.
pub fn round_e2m1(x: f32) -> f32 {
    let x = x.clamp(-E2M1_MAX, E2M1_MAX);
    let spacing = power_of_two(exponent(x).max(0) - 1);
    (x / spacing).round_ties_even() * spacing
}

/// The smallest power of two not less than `x`, for positive normal `x`; exact, because it is computed from the bits.
pub fn ceil_power_of_two(x: f32) -> f32 {
    let bits = x.to_bits();
    let up = u32::from(bits & 0x7f_ffff != 0);
    f32::from_bits(((bits >> 23) + up) << 23)
}

/// Rounds `group` to `limit`-bounded codes times a power-of-two scale, in place: codes stay. Returns the scale.
/// `smallest` bounds the largest magnitude from below.
pub fn quantize(group: &mut [f32], limit: f32, smallest: f32, round: fn(f32) -> f32) -> f32 {
    let amax = group.iter().fold(smallest, |max, x| max.max(x.abs()));
    let scale = ceil_power_of_two(amax / limit);
    group.iter_mut().for_each(|x| *x = round(*x / scale));
    scale
}

fn exponent(x: f32) -> i32 {
    (x.to_bits() >> 23 & 255) as i32 - 127
}

/// `2^n` for normal results.
const fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The nearest value of a table, ties to the even code, by trying all.
    fn nearest(x: f32, table: impl Fn(u8) -> f32, codes: u8) -> f32 {
        let distance = |code: u8| (f64::from(table(code)) - f64::from(x).abs()).abs();
        let best = (0..codes).min_by(|a, b| distance(*a).total_cmp(&distance(*b)).then((a % 2).cmp(&(b % 2))));
        table(best.unwrap()).copysign(x)
    }

    #[test]
    fn rounding_finds_the_nearest_value_with_ties_to_even() {
        for i in -2000..2000 {
            // Every tie of E2M1 and many of e4m3 are multiples of 2^-11.
            let (x, y) = (i as f32 / 256.0, i as f32 / 2048.0 * 500.0);
            assert_eq!(round_e2m1(x), nearest(x.clamp(-6.0, 6.0), e2m1, 8), "{x}");
            for v in [x, y, i as f32 / 131_072.0] {
                assert_eq!(round_e4m3(v), nearest(v.clamp(-448.0, 448.0), e4m3, 0x7f), "{v}");
                assert_eq!(e4m3(encode_e4m3(v)), round_e4m3(v), "{v}");
            }
        }
        assert_eq!((round_e4m3(1e9), round_e2m1(-7.0)), (448.0, -6.0));
    }

    #[test]
    fn every_code_is_its_own_rounding() {
        for byte in 0..=255u8 {
            assert!(byte & 0x7f == 0x7f || round_e4m3(e4m3(byte)) == e4m3(byte), "{byte}");
            assert_eq!(round_e2m1(e2m1(byte & 15)), e2m1(byte & 15));
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        assert_eq!((e4m3(0x7e), e4m3(1), e4m3(0x38), e4m3(0xb8)), (448.0, 2f32.powi(-9), 1.0, -1.0));
    }

    #[test]
    fn trap_08_scales_are_bytes_of_exponents_not_numbers() {
        assert_eq!((e8m0(127), e8m0(120), e8m0(1), e8m0(254)), (1.0, 2f32.powi(-7), 2f32.powi(-126), 2f32.powi(127)));
        assert_eq!(f64::from(e8m0(0)), 2f64.powi(-127));
        assert!(e8m0(255).is_nan());
        for (x, up) in [(1.0, 1.0), (1.0001, 2.0), (0.75, 1.0), (2f32.powi(-20), 2f32.powi(-20)), (447.0, 512.0)] {
            assert_eq!(ceil_power_of_two(x), up, "a scale is a power of two, never smaller than asked for");
        }
    }
}
