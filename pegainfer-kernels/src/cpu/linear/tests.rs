//! Every path of this machine against an f64 reference, and bit for bit against itself in other batches.

mod fp8;
mod grouped;
mod int8;

use super::*;
use pegainfer_core::team::Team;

/// xorshift64*: reproducible without a dependency.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Uniform in `from..=to`.
    fn range(&mut self, from: usize, to: usize) -> usize {
        from + (self.next() >> 33) as usize % (to - from + 1)
    }

    /// Uniform in -1 .. 1, as bf16.
    fn values(&mut self, len: usize) -> Vec<bf16> {
        (0..len).map(|_| bf16::from_f32((self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0)).collect()
    }
}

fn linear_f32(isa: Isa, x: &[bf16], w: &[bf16], m: usize, n: usize, k: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; m * n];
    linear(isa, x, w, m, n, k, LinearOut::F32(&mut out), &mut Scratch::new());
    out
}

/// The tolerance bounds the error of a sum of `k` products in f32 in any order: `k * 2^-24 * sum |x w|`, plus the loss
/// of flushed denormal products (`k * 2^-126`). It does not hide a wrong term: one term is about `sum |x w| / k`,
/// thousands of times as large for the `k` used here.
fn assert_matches_reference(isa: Isa, x: &[bf16], w: &[bf16], m: usize, n: usize, k: usize) {
    let out = linear_f32(isa, x, w, m, n, k);
    for (i, out) in out.chunks_exact(n).enumerate() {
        for (j, &got) in out.iter().enumerate() {
            let products = || x[i * k..][..k].iter().zip(&w[j * k..][..k]).map(|(x, w)| x.to_f64() * w.to_f64());
            let want: f64 = products().sum();
            let bound = k as f64 * (0.5 * f64::from(f32::EPSILON) * products().map(f64::abs).sum::<f64>() + 1.2e-38);
            assert!((f64::from(got) - want).abs() <= bound, "{isa} [{m},{n},{k}] at ({i},{j}): {got} is not {want}");
        }
    }
}

#[test]
fn matches_the_reference_on_random_shapes() {
    let mut rng = Rng(0x1234_5678_9abc_def1);
    for isa in Isa::available() {
        for case in 0..60 {
            let (m, n, k) = (rng.range(1, 70), rng.range(1, 90), rng.range(1, 200));
            let (x, w) = (rng.values(m * k), rng.values(n * k));
            assert_matches_reference(isa, &x, &w, m, n, k);
            // Whole steps and tiles, as in real models.
            let (m, n, k) = (case + 1, n.next_multiple_of(32), k.next_multiple_of(32));
            let (x, w) = (rng.values(m * k), rng.values(n * k));
            assert_matches_reference(isa, &x, &w, m, n, k);
        }
    }
}

#[test]
fn matches_the_reference_across_blocks() {
    let mut rng = Rng(7);
    for isa in Isa::available() {
        for (m, n, k) in [(300, 50, 2100), (530, 33, 1000), (33, 40, 3073), (5, 1000, 96)] {
            let (x, w) = (rng.values(m * k), rng.values(n * k));
            assert_matches_reference(isa, &x, &w, m, n, k);
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_every_batch() {
    let mut rng = Rng(99);
    let mut shapes: Vec<_> = (1..=70).map(|m| (m, rng.range(1, 80), rng.range(1, 300))).collect();
    shapes.extend([(200, 100, 2085), (130, 64, 4096), (33, 7, 1031)]);
    let teams = [1, 2, 3, 8].map(|threads| Team::new(threads).unwrap());
    for isa in Isa::available() {
        for (case, &(m, n, k)) in shapes.iter().enumerate() {
            let (x, w) = (rng.values(m * k), rng.values(n * k));
            let batch = teams[case % 4].install(|| linear_f32(isa, &x, &w, m, n, k));
            for i in 0..m {
                let alone = teams[(case + i) % 4].install(|| linear_f32(isa, &x[i * k..][..k], &w, 1, n, k));
                assert_same_bits(&batch[i * n..][..n], &alone, &format!("{isa} [{m},{n},{k}] row {i}"));
            }
            // A w row's place among the others does not matter either.
            let from = n / 3;
            let part = linear_f32(isa, &x, &w[from * k..], m, n - from, k);
            for (i, part) in part.chunks_exact(n - from).enumerate() {
                assert_same_bits(&batch[i * n..][from..n], part, &format!("{isa} [{m},{n},{k}] row {i} from {from}"));
            }
        }
    }
}

fn assert_same_bits(a: &[f32], b: &[f32], what: &str) {
    assert!(a.iter().map(|v| v.to_bits()).eq(b.iter().map(|v| v.to_bits())), "{what}: bits differ");
}

#[test]
fn bf16_output_is_the_f32_output_rounded_once() {
    let mut rng = Rng(5);
    for isa in Isa::available() {
        for (m, n, k) in [(1, 37, 64), (9, 50, 70), (40, 64, 128)] {
            let (mut x, mut w) = (rng.values(m * k), rng.values(n * k));
            x[0] = bf16::NAN;
            w[0] = bf16::INFINITY;
            w[(n - 1) * k] = bf16::MAX;
            let wide = linear_f32(isa, &x, &w, m, n, k);
            let mut narrow = vec![bf16::NAN; m * n];
            linear(isa, &x, &w, m, n, k, LinearOut::Bf16(&mut narrow), &mut Scratch::new());
            for (i, (wide, narrow)) in wide.iter().zip(&narrow).enumerate() {
                assert_eq!(bf16::from_f32(*wide).to_bits(), narrow.to_bits(), "{isa} [{m},{n},{k}] at {i}: {wide}");
            }
        }
    }
}

#[test]
fn values_outside_a_row_never_reach_its_outputs() {
    for isa in Isa::available() {
        // NaN everywhere except in x row 1 and w row 1: output (1, 1) must not see it, for any padding of the path.
        for k in [1, 15, 31, 33, 95] {
            let (m, n) = (3, 3);
            let (mut x, mut w) = (vec![bf16::NAN; m * k], vec![bf16::NAN; n * k]);
            x[k..2 * k].fill(bf16::ONE);
            w[k..2 * k].fill(bf16::ONE);
            assert_eq!(linear_f32(isa, &x, &w, m, n, k)[n + 1], k as f32, "{isa} k = {k}");
        }
    }
}

#[test]
fn scratch_is_reused_between_shapes() {
    let mut rng = Rng(21);
    let mut scratch = Scratch::new();
    for isa in Isa::available() {
        for (m, n, k) in [(20, 40, 300), (1, 40, 33), (7, 3, 100)] {
            let (x, w) = (rng.values(m * k), rng.values(n * k));
            let mut out = vec![f32::NAN; m * n];
            linear(isa, &x, &w, m, n, k, LinearOut::F32(&mut out), &mut scratch);
            assert_same_bits(&out, &linear_f32(isa, &x, &w, m, n, k), "dirty scratch");
        }
    }
}

#[test]
fn empty_problems_are_fine() {
    for isa in Isa::available() {
        assert!(linear_f32(isa, &[], &[], 0, 0, 32).is_empty());
        assert_eq!(linear_f32(isa, &[], &[], 2, 1, 0), [0.0, 0.0]);
    }
}
