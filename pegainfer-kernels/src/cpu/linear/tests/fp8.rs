//! FP8 weights: against f64, and bit for bit against themselves in other batches and stacks.

use super::{Rng, assert_same_bits};
use crate::cpu::formats::{e4m3, e8m0};
use crate::cpu::linear::*;
use crate::cpu::weights::{BLOCK, Scales};
use pegainfer_core::team::Team;

/// An FP8 weight `[n, k]` with scales of both formats that have the same values.
struct Weight {
    n: usize,
    k: usize,
    codes: Vec<u8>,
    exponents: Vec<u8>,
    scales: Vec<f32>,
}

impl Weight {
    fn new(rng: &mut Rng, n: usize, k: usize) -> Self {
        // Every code except NaN.
        let codes = (0..n * k).map(|_| rng.range(0, 255) as u8).map(|c| if c & 0x7f == 0x7f { c & 0xf7 } else { c });
        let codes = codes.collect();
        let blocks = n.div_ceil(BLOCK) * k.div_ceil(BLOCK);
        let exponents: Vec<u8> = (0..blocks).map(|_| rng.range(110, 125) as u8).collect();
        let scales = exponents.iter().map(|byte| e8m0(*byte)).collect();
        Self { n, k, codes, exponents, scales }
    }

    fn weights(&self) -> Weights<'_> {
        Weights::Fp8(&self.codes, Scales::F32(&self.scales))
    }

    fn value(&self, row: usize, col: usize) -> f64 {
        let scale = self.scales[row / BLOCK * self.k.div_ceil(BLOCK) + col / BLOCK];
        f64::from(e4m3(self.codes[row * self.k + col])) * f64::from(scale)
    }
}

fn f32s(isa: Isa, x: &[bf16], parts: &[Weights<'_>], (m, n, k): (usize, usize, usize)) -> Vec<f32> {
    let mut out = vec![f32::NAN; m * n];
    linear_stacked((isa, Activations::Exact), x, parts, (m, k), LinearOut::F32(&mut out), &mut Scratch::new());
    out
}

/// Tolerance of bf16 weights, plus one or two roundings for scaling a block and adding it.
fn assert_matches_f64(isa: Isa, x: &[bf16], w: &Weight, m: usize) {
    let (n, k) = (w.n, w.k);
    let out = f32s(isa, x, &[w.weights()], (m, n, k));
    for (i, out) in out.chunks_exact(n).enumerate() {
        for (j, &got) in out.iter().enumerate() {
            let products = || (0..k).map(|l| x[i * k + l].to_f64() * w.value(j, l));
            let (want, size): (f64, f64) = (products().sum(), products().map(f64::abs).sum());
            let bound = (k + 2 * k.div_ceil(BLOCK)) as f64 * 0.5 * f64::from(f32::EPSILON) * size;
            assert!((f64::from(got) - want).abs() <= bound, "{isa} [{m},{n},{k}] at ({i},{j}): {got} is not {want}");
        }
    }
}

#[test]
fn matches_f64() {
    let mut rng = Rng(0x1234_5678_9abc_def1);
    for isa in Isa::available() {
        for case in 0..30 {
            let (m, n, k) = (rng.range(1, 40), rng.range(1, 300), rng.range(1, 400));
            let (x, w) = (rng.values(m * k), Weight::new(&mut rng, n, k));
            assert_matches_f64(isa, &x, &w, m);
            // Whole blocks, as in real models.
            let (m, n, k) = (case + 1, 128, k.next_multiple_of(128));
            let (x, w) = (rng.values(m * k), Weight::new(&mut rng, n, k));
            assert_matches_f64(isa, &x, &w, m);
        }
        let (x, w) = (rng.values(300 * 1100), Weight::new(&mut rng, 40, 1100));
        assert_matches_f64(isa, &x, &w, 300);
    }
}

#[test]
fn a_row_has_the_same_bits_in_every_batch_and_with_either_scales() {
    let mut rng = Rng(99);
    let teams = [1, 3].map(|threads| Team::new(threads).unwrap());
    for isa in Isa::available() {
        for m in [1, 2, 7, 16, 17, 33, 64] {
            let (n, k) = (rng.range(1, 300), rng.range(1, 500));
            let (x, w) = (rng.values(m * k), Weight::new(&mut rng, n, k));
            let batch = teams[0].install(|| f32s(isa, &x, &[w.weights()], (m, n, k)));
            for i in 0..m {
                let alone = teams[1].install(|| f32s(isa, &x[i * k..][..k], &[w.weights()], (1, n, k)));
                assert_same_bits(&batch[i * n..][..n], &alone, &format!("{isa} [{m},{n},{k}] row {i}"));
            }
            let exponents = Weights::Fp8(&w.codes, Scales::E8m0(&w.exponents));
            assert_same_bits(&batch, &f32s(isa, &x, &[exponents], (m, n, k)), "E8M0 scales");
        }
    }
}

#[test]
fn stacked_parts_are_columns_of_the_output() {
    let mut rng = Rng(3);
    for isa in Isa::available() {
        for m in [1, 20] {
            let k = 200;
            let (x, plain) = (rng.values(m * k), rng.values(10 * k));
            let [a, b] = [130, 37].map(|n| Weight::new(&mut rng, n, k));
            let parts = [a.weights(), Weights::Bf16(&plain), b.weights()];
            let n = a.n + 10 + b.n;
            let whole = f32s(isa, &x, &parts, (m, n, k));
            let mut rounded = vec![bf16::NAN; m * n];
            linear_stacked(
                (isa, Activations::Exact),
                &x,
                &parts,
                (m, k),
                LinearOut::Bf16(&mut rounded),
                &mut Scratch::new(),
            );
            assert!(whole.iter().zip(&rounded).all(|(whole, rounded)| bf16::from_f32(*whole) == *rounded));
            let mut first = 0;
            for part in parts {
                let rows = part.rows(k);
                let alone = f32s(isa, &x, &[part], (m, rows, k));
                for (whole, alone) in whole.chunks_exact(n).zip(alone.chunks_exact(rows)) {
                    assert_same_bits(&whole[first..][..rows], alone, &format!("{isa} from column {first}"));
                }
                first += rows;
            }
        }
    }
}

#[test]
fn numbers_outside_a_row_never_reach_its_outputs() {
    for isa in Isa::available() {
        for k in [1, 31, 33, 127, 129] {
            // NaN in the other rows of x; the largest codes in the other rows of w.
            let (mut x, mut codes) = (vec![bf16::NAN; 3 * k], vec![0x7e; 3 * k]);
            x[k..2 * k].fill(bf16::ONE);
            codes[k..2 * k].fill(0x38);
            let scales = vec![1.0; k.div_ceil(BLOCK)];
            let out = f32s(isa, &x, &[Weights::Fp8(&codes, Scales::F32(&scales))], (3, 3, k));
            assert_eq!(out[4], k as f32, "{isa} k = {k}");
        }
    }
}
