//! Counter-based random numbers: a pure function of (seed, position), so neither preemption nor batching changes a
//! draw.

/// 64 random bits for one position of one request.
///
/// This is the SplitMix64 generator (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
/// 2014): the mixed seed is the start of a stream, `position` its counter. For a fixed seed no two positions give the
/// same bits, and for a fixed position no two seeds do, since every step is a bijection.
#[inline]
pub fn bits(seed: u64, position: u64) -> u64 {
    let start = mix(seed.wrapping_add(GOLDEN));
    mix(start.wrapping_add(position.wrapping_add(1).wrapping_mul(GOLDEN)))
}

/// Scales 64 random bits to a whole number below `n`, uniform within `n / 2^64`. 0 for `n` 0.
#[inline]
pub fn below(bits: u64, n: u64) -> u64 {
    ((u128::from(bits) * u128::from(n)) >> 64) as u64
}

/// Fills `out` with random numbers below `n`: the one at index `i` is `below(bits(seed, i), n)`.
pub fn fill_below(seed: u64, n: u32, out: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
    {
        // SAFETY: this machine has the instructions.
        return unsafe { fill_below_avx512(seed, n, out) };
    }
    fill_below_portable(seed, n, out);
}

/// [`fill_below`] compiled for AVX-512, which multiplies 64-bit numbers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
fn fill_below_avx512(seed: u64, n: u32, out: &mut [u32]) {
    fill_below_portable(seed, n, out);
}

#[inline(always)]
fn fill_below_portable(seed: u64, n: u32, out: &mut [u32]) {
    let n = u64::from(n);
    for (number, position) in out.iter_mut().zip(0..) {
        let bits = bits(seed, position);
        // Same as `below`, with multiplications that give 64 bits.
        let (high, low) = ((bits >> 32) * n, (bits & u64::from(u32::MAX)) * n);
        *number = ((high + (low >> 32)) >> 32) as u32;
    }
}

/// 2^64 divided by the golden ratio, made odd: the increment of SplitMix64.
pub const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finaliser of SplitMix64 (variant 13 of Stafford's mixers): a bijection that spreads every bit over all.
#[inline]
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// A uniform number in [0, 1).
    fn uniform(seed: u64, position: u64) -> f64 {
        below(bits(seed, position), 1 << 53) as f64 / (1u64 << 53) as f64
    }

    /// Chi-square over `cells` equal cells; about normal with mean `cells - 1` and variance `2 (cells - 1)`.
    fn chi_square(cells: usize, draws: impl Iterator<Item = f64>) -> f64 {
        let mut counts = vec![0u32; cells];
        draws.for_each(|u| counts[(u * cells as f64) as usize] += 1);
        let expected = f64::from(counts.iter().sum::<u32>()) / cells as f64;
        counts.iter().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum()
    }

    #[test]
    fn uniform_along_positions_and_along_seeds() {
        const N: u64 = 1_000_000;
        let along_positions = |i| uniform(42, i);
        let along_seeds = |i| uniform(i, 42);
        for draw in [&along_positions as &dyn Fn(u64) -> f64, &along_seeds] {
            let mean = (0..N).map(draw).sum::<f64>() / N as f64;
            let variance = (0..N).map(|i| (draw(i) - 0.5).powi(2)).sum::<f64>() / N as f64;
            // Five standard errors.
            assert!((mean - 0.5).abs() < 5.0 * (1.0 / 12.0 / N as f64).sqrt(), "{mean}");
            assert!((variance - 1.0 / 12.0).abs() < 5.0 * (1.0 / 180.0 / N as f64).sqrt(), "{variance}");
            let chi = chi_square(1000, (0..N).map(draw));
            assert!((chi - 999.0).abs() < 5.0 * (2.0 * 999.0f64).sqrt(), "{chi}");
            // Pairs of neighbours, 32 by 32 cells.
            let pairs = (0..N).map(|i| ((draw(i) * 32.0).floor() + draw(i + 1)) / 32.0);
            let chi = chi_square(1024, pairs);
            assert!((chi - 1023.0).abs() < 5.0 * (2.0 * 1023.0f64).sqrt(), "{chi}");
            assert!((0..N).map(draw).all(|u| (0.0..1.0).contains(&u)));
        }
    }

    #[test]
    fn neighbouring_seeds_and_positions_do_not_collide() {
        let mut seen = HashSet::new();
        for seed in (0..500).chain(u64::MAX - 499..=u64::MAX) {
            for position in (0..500).chain(1 << 40..(1 << 40) + 500) {
                assert!(seen.insert(bits(seed, position)), "{seed} {position}");
            }
        }
    }

    #[test]
    fn many_numbers_are_those_that_are_drawn_one_by_one() {
        for n in [0, 1, 1000, 151_936, u32::MAX] {
            let (mut filled, mut portable) = (vec![0; 101], vec![0; 101]);
            fill_below(7, n, &mut filled);
            fill_below_portable(7, n, &mut portable);
            let drawn: Vec<u32> = (0..101).map(|i| below(bits(7, i), u64::from(n)) as u32).collect();
            assert_eq!((&filled, &portable), (&drawn, &drawn));
        }
    }

    #[test]
    fn the_first_draws_are_splitmix64() {
        // Reference values of SplitMix64 started at 1234567, the generator used by `mix` and `GOLDEN`.
        let stream: Vec<u64> = (1..=3u64).map(|i| mix(1_234_567u64.wrapping_add(i.wrapping_mul(GOLDEN)))).collect();
        assert_eq!(stream, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }
}
