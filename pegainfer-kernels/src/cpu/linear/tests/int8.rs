//! Group-quantised weights with activations in int8: against f64, and bit for bit between batches, teams and paths.

mod rates;
mod weight;

use super::{Rng, assert_same_bits};
use crate::cpu::linear::*;
use half::f16;
use pegainfer_core::team::Team;
use pegainfer_core::weights::grouped::{GroupFormat, GroupScales, Offset, ScaleDType, Values};
use weight::Weight;

const fn scales(values: Values, scales: GroupScales) -> GroupFormat {
    GroupFormat { values, scales }
}

const Q4_K: GroupFormat = scales(Values::Int { bits: 4 }, GroupScales::K4);
const Q6_K: GroupFormat = scales(Values::Int { bits: 6 }, GroupScales::K6);
const IQ4_NL: GroupFormat =
    scales(Values::Iq4, GroupScales::Plain { group: 32, dtype: ScaleDType::F16, offset: Offset::None });

/// Every kind of codes and scales that the path has, for rows of `k` columns: those that fit.
fn formats(k: usize) -> Vec<GroupFormat> {
    use Offset::{Min, None, Zero};
    use ScaleDType::{Bf16, F16, F32};
    let int = GroupFormat::int;
    let all = [
        Q4_K,
        scales(Values::Int { bits: 5 }, GroupScales::K4),
        Q6_K,
        int(8, 32, F16, None),
        int(4, 128, F16, None),
        int(4, 128, Bf16, Zero),
        int(4, 64, F32, Zero),
        int(4, 32, Bf16, None),
        int(4, 32, F16, Zero),
        int(4, k, F32, None),
        int(4, 16, F16, None),
        int(4, 32, F16, Min),
        int(5, 32, F16, None),
        int(5, 32, F16, Min),
        int(6, 32, F16, Zero),
        int(8, 64, Bf16, Zero),
        IQ4_NL,
        scales(Values::Iq4, GroupScales::Xs),
        GroupFormat::NVFP4,
        GroupFormat::MXFP4,
    ];
    all.into_iter().filter(|format| format.group() <= k && format.check(k).is_ok()).collect()
}

fn int8(isa: Isa, x: &[bf16], parts: &[Weights<'_>], (m, n, k): (usize, usize, usize)) -> Vec<f32> {
    let mut out = vec![f32::NAN; m * n];
    linear_stacked((isa, Activations::Rounded), x, parts, (m, k), LinearOut::F32(&mut out), &mut Scratch::new());
    out
}

/// The numbers that stand for 32 columns of x: multiples of the largest magnitude over 127.
fn rounded(x: &[bf16]) -> Vec<f64> {
    let max = x.iter().fold(0f32, |max, x| max.max(x.to_f32().abs()));
    if max == 0.0 {
        return vec![0.0; x.len()];
    }
    let inverse = 127.0 / max;
    x.iter().map(|x| f64::from((x.to_f32() * inverse).round_ties_even()) * f64::from(max / 127.0)).collect()
}

/// Two tolerances: rounding x moves a product by at most `|w| · max / 254`. With x rounded by the test, what is left is
/// the error of f32: a handful of roundings per 32 columns, each relative to the terms and offsets that it adds.
fn assert_matches_f64(isa: Isa, x: &[bf16], w: &Weight, (m, n, k): (usize, usize, usize)) {
    let out = int8(isa, x, &w.parts(), (m, n, k));
    let numbers = w.dequantize(n, k);
    // The largest magnitude of codes times scale, and of the offset: `o` cancels a part of `s·v`.
    let largest = |row: &[f32]| row.iter().fold(0f64, |max, w| max.max(f64::from(w.abs()))) * 40.0;
    for i in 0..m {
        let x = &x[i * k..][..k];
        let near: Vec<f64> = x.chunks(32).flat_map(rounded).collect();
        for (j, row) in numbers.chunks_exact(k).enumerate() {
            let got = f64::from(out[i * n + j]);
            let terms = |x: &[f64]| x.iter().zip(row).map(|(x, w)| x * f64::from(*w)).sum::<f64>();
            let exact: Vec<f64> = x.iter().map(|x| x.to_f64()).collect();
            let size: f64 = near.iter().map(|x| x.abs()).sum::<f64>() * largest(row);
            let error = (k / 32 + 4) as f64 * f64::from(f32::EPSILON) * size;
            let what = || format!("{isa} {} [{m},{n},{k}] at ({i},{j})", w.format);
            assert!((got - terms(&near)).abs() <= error, "{}: {got} is not {}", what(), terms(&near));
            let step = |x: &[bf16]| x.iter().fold(0f64, |max, x| max.max(x.to_f64().abs())) / 254.0;
            let size = |w: &[f32]| w.iter().map(|w| f64::from(w.abs())).sum::<f64>();
            let moved: f64 = x.chunks(32).zip(row.chunks(32)).map(|(x, w)| step(x) * size(w)).sum();
            assert!((got - terms(&exact)).abs() <= 1.001 * moved + error, "{}: {got} is not {}", what(), terms(&exact));
        }
    }
}

#[test]
fn every_format_matches_f64() {
    let mut rng = Rng(0x1234_5678_9abc_def1);
    for isa in Isa::available() {
        for k in [32, 64, 96, 128, 256, 288, 512, 1280] {
            for format in formats(k) {
                let (m, n) = (rng.range(1, 20), rng.range(1, 50));
                let w = Weight::new(&mut rng, format, n, k);
                assert_matches_f64(isa, &rng.values(m * k), &w, (m, n, k));
            }
        }
    }
    assert_eq!(formats(1280).len(), 20);
}

#[test]
fn bits_depend_on_neither_batch_nor_team_nor_path() {
    let mut rng = Rng(99);
    let teams = [1, 2, 3].map(|threads| Team::new(threads).unwrap());
    for (case, k) in [32, 96, 256, 768, 2304].into_iter().enumerate() {
        for format in formats(k) {
            let (m, n) = (rng.range(1, 40), rng.range(1, 90));
            let (x, w) = (rng.values(m * k), Weight::new(&mut rng, format, n, k));
            let want = int8(Isa::Portable, &x, &w.parts(), (m, n, k));
            for isa in Isa::available() {
                let batch = teams[case % 3].install(|| int8(isa, &x, &w.parts(), (m, n, k)));
                assert_same_bits(&batch, &want, &format!("{isa} {format} [{m},{n},{k}]"));
            }
            let best = Isa::best();
            for i in 0..m {
                let alone = teams[(case + i) % 3].install(|| int8(best, &x[i * k..][..k], &w.parts(), (1, n, k)));
                assert_same_bits(&want[i * n..][..n], &alone, &format!("{format} [{m},{n},{k}] row {i}"));
            }
            // A w row's place among the others does not matter either.
            let from = n / 3;
            let part = int8(best, &x, &w.without_first(from, k).parts(), (m, n - from, k));
            for (i, part) in part.chunks_exact(n - from).enumerate() {
                assert_same_bits(&want[i * n..][from..n], part, &format!("{format} row {i} from {from}"));
            }
        }
    }
}

#[test]
fn a_large_batch_in_several_blocks_has_the_same_bits() {
    let mut rng = Rng(4);
    let (m, n, k) = (300, 70, 2816);
    for format in [Q4_K, Q6_K, IQ4_NL] {
        let (x, w) = (rng.values(m * k), Weight::new(&mut rng, format, n, k));
        let team = Team::new(3).unwrap();
        let batch = team.install(|| int8(Isa::best(), &x, &w.parts(), (m, n, k)));
        for i in [0, 17, 150, 299] {
            let alone = int8(Isa::best(), &x[i * k..][..k], &w.parts(), (1, n, k));
            assert_same_bits(&batch[i * n..][..n], &alone, &format!("{format} row {i}"));
        }
    }
}

#[test]
fn parts_of_a_stack_are_columns_of_the_output() {
    let mut rng = Rng(3);
    let k = 256;
    let formats = [Q4_K, Q6_K, GroupFormat::fp8(k, ScaleDType::F32), IQ4_NL];
    let weights = formats.map(|format| {
        let mut w = Weight::new(&mut rng, format, 21, k);
        // No code is NaN.
        if format.values == Values::E4m3 {
            w.codes.iter_mut().for_each(|code| *code &= 0xf7);
        }
        w
    });
    let plain = rng.values(10 * k);
    let parts = [
        weights[0].parts()[0],
        weights[1].parts()[0],
        Weights::Bf16(&plain),
        weights[2].parts()[0],
        weights[3].parts()[0],
    ];
    for isa in Isa::available() {
        for m in [1, 20] {
            let x = rng.values(m * k);
            let n = 4 * 21 + 10;
            let whole = int8(isa, &x, &parts, (m, n, k));
            let mut narrow = vec![bf16::NAN; m * n];
            let out = LinearOut::Bf16(&mut narrow);
            linear_stacked((isa, Activations::Rounded), &x, &parts, (m, k), out, &mut Scratch::new());
            assert!(whole.iter().zip(&narrow).all(|(whole, narrow)| bf16::from_f32(*whole) == *narrow));
            let mut first = 0;
            for part in parts {
                let rows = part.rows(k);
                let alone = int8(isa, &x, &[part], (m, rows, k));
                for (whole, alone) in whole.chunks_exact(n).zip(alone.chunks_exact(rows)) {
                    assert_same_bits(&whole[first..][..rows], alone, &format!("{isa} from column {first}"));
                }
                first += rows;
            }
        }
    }
}

#[test]
fn numbers_that_are_not_finite_reach_their_own_row_only() {
    let mut rng = Rng(8);
    let (m, n, k) = (11, 20, 512);
    for isa in Isa::available() {
        for format in formats(k) {
            let w = Weight::new(&mut rng, format, n, k);
            let x = rng.values(m * k);
            let clean = int8(isa, &x, &w.parts(), (m, n, k));
            for bad in [bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY] {
                let mut x = x.clone();
                x[4 * k + 77] = bad;
                let out = int8(isa, &x, &w.parts(), (m, n, k));
                for (i, (out, clean)) in out.chunks_exact(n).zip(clean.chunks_exact(n)).enumerate() {
                    if i == 4 {
                        assert!(out.iter().all(|out| out.is_nan()), "{isa} {format} {bad}: {out:?}");
                    } else {
                        assert_same_bits(out, clean, &format!("{isa} {format} row {i}"));
                    }
                }
            }
        }
    }
}

#[test]
fn zeros_and_the_smallest_and_largest_numbers() {
    let mut rng = Rng(8);
    let k = 256;
    for isa in Isa::available() {
        for format in formats(k) {
            let w = Weight::new(&mut rng, format, 3, k);
            for tiny in [bf16::ZERO, bf16::NEG_ZERO, bf16::from_bits(1), bf16::from_bits(0x8300)] {
                let out = int8(isa, &vec![tiny; k], &w.parts(), (1, 3, k));
                assert!(out.iter().all(|out| *out == 0.0), "{isa} {format} {tiny:?}: {out:?}");
            }
            // 2^-110 and 2^100: results differ by the factor alone.
            let of = |x: f32| int8(isa, &vec![bf16::from_f32(x); k], &w.parts(), (1, 3, k));
            let (small, one, large) = (of(2f32.powi(-100)), of(1.0), of(2f32.powi(100)));
            for j in 0..3 {
                assert_eq!([small[j] * 2f32.powi(100), large[j] * 2f32.powi(-100)], [one[j]; 2], "{isa} {format}");
            }
        }
    }
}

#[test]
fn codes_of_the_largest_magnitude_do_not_saturate() {
    let (mut rng, k) = (Rng(6), 64);
    for isa in Isa::available() {
        for format in formats(256) {
            // Between them, the bytes have the smallest and the largest code of each format.
            for byte in [0x00, 0x77, 0x7f, 0x80, 0xff] {
                let mut w = Weight::new(&mut rng, format, 2, 256);
                w.codes.fill(byte);
                for x in [1.0, -1.0] {
                    assert_matches_f64(isa, &[bf16::from_f32(x); 256], &w, (1, 2, 256));
                }
            }
        }
        for format in [GroupFormat::int(8, 32, ScaleDType::F16, Offset::None), IQ4_NL] {
            // -128 or -127 everywhere, against x of both signs.
            let (code, value) = if format == IQ4_NL { (0, -127.0) } else { (0x80, -128.0) };
            let scales = [f16::ONE; 2].map(f16::to_le_bytes).concat();
            let w = Weight { format, codes: vec![code; format.code_bytes(k)], scales };
            for x in [1.0, -1.0] {
                let out = int8(isa, &vec![bf16::from_f32(x); k], &w.parts(), (1, 1, k));
                assert!((out[0] - x * value * 64.0).abs() < 1e-2, "{isa} {format} {x}: {out:?}");
            }
        }
    }
}
