//! Group-quantised weights: against f64, in stacks, and bit for bit against themselves in other batches.

use super::{Rng, assert_same_bits};
use crate::cpu::linear::*;
use crate::cpu::weights::Grouped;
use pegainfer_core::weights::grouped::{GroupFormat, GroupScales, Offset, ScaleDType, Values};

/// Random codes and scales. All bytes are below 64, so that no number is NaN or infinite.
fn planes(rng: &mut Rng, format: GroupFormat, n: usize, k: usize) -> (Vec<u8>, Vec<u8>) {
    let mut bytes = |count: usize| (0..count).map(|_| rng.range(0, 63) as u8).collect();
    (bytes(n * format.code_bytes(k)), bytes(n * format.scale_bytes(k)))
}

#[test]
fn outputs_match_f64_in_stacks_and_batches() {
    let mut rng = Rng(11);
    let (m, n, k) = (5, 37, 512);
    let block = |values, scales| GroupFormat { values, scales };
    for format in [
        GroupFormat::int(4, 128, ScaleDType::F16, Offset::Zero),
        GroupFormat::int(8, k, ScaleDType::Bf16, Offset::None),
        block(Values::Int { bits: 5 }, GroupScales::K4),
        block(Values::Int { bits: 6 }, GroupScales::K6),
        block(Values::Iq4, GroupScales::Xs),
        GroupFormat::NVFP4,
        GroupFormat::fp8(k, ScaleDType::F32),
    ] {
        let (codes, scales) = planes(&mut rng, format, n, k);
        let grouped = Grouped { format, codes: &codes, scales: &scales };
        let mut w = vec![0.0; n * k];
        w.chunks_exact_mut(k).enumerate().for_each(|(j, row)| grouped.dequantize_row(j, k, row));
        let (x, plain) = (rng.values(m * k), rng.values(3 * k));
        for isa in Isa::available() {
            let parts = [Weights::Bf16(&plain), Weights::Grouped(grouped)];
            let run = |x: &[bf16], m: usize| {
                let mut out = vec![f32::NAN; m * (n + 3)];
                linear_stacked(
                    (isa, Activations::Exact),
                    x,
                    &parts,
                    (m, k),
                    LinearOut::F32(&mut out),
                    &mut Scratch::new(),
                );
                out
            };
            let out = run(&x, m);
            for (i, row) in out.chunks_exact(n + 3).enumerate() {
                assert_same_bits(&run(&x[i * k..][..k], 1), row, &format!("{isa} {format} row {i} alone"));
                for (j, got) in row[3..].iter().enumerate() {
                    let products = || (0..k).map(|l| x[i * k + l].to_f64() * f64::from(w[j * k + l]));
                    let (want, size): (f64, f64) = (products().sum(), products().map(f64::abs).sum());
                    let bound = k as f64 * 0.5 * f64::from(f32::EPSILON) * size;
                    assert!((f64::from(*got) - want).abs() <= bound, "{isa} {format} ({i},{j}): {got} is not {want}");
                }
            }
        }
    }
}
