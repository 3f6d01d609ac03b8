//! The low precision of activations and of the indexer that the model was trained with, simulated: values are
//! rounded and stored as numbers.

use super::values::{cpu, read, rows, write};
use crate::cpu::deepseek_v4::kv_quant as reference;
use crate::cpu::weights::BLOCK;
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Rounds an activation to FP8, in place, as the reference does before its FP8 and FP4 matrices: each 128 values of a
/// row become e4m3 codes, clamped to ±448 and rounded to nearest even, with the scale `2^ceil(log2(max(amax, 1e-4) /
/// 448))`. The rounded values are exact in bf16.
///
/// `x`: `[tokens, width]` bf16 or f32, `width` a multiple of 128.
pub fn round_activation(exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
    let check = Check("round_activation");
    let (tokens, width) = x.rows_cols();
    rows(check, x, (tokens, width))?;
    check.that(width.is_multiple_of(BLOCK), "rows must be groups of 128")?;
    exec.record(|_| OpRecord::new("round_activation", "groups", &[x], &[x], 4 * x.elements() as u64));
    if exec.device() == Device::Cuda {
        return gpu::round_activation(exec, x);
    }
    if cpu(check, exec)?.is_some() {
        let mut values = read(x).into_owned();
        reference::fp8(&mut values, BLOCK);
        write(x, &values);
    }
    Ok(())
}

/// One head or entry of the indexer: multiplied by the Hadamard matrix `H_ij = (-1)^popcount(i & j) / sqrt(dim)` and,
/// with `quantize`, rounded to FP4: groups of 32 values, each with the scale `2^ceil(log2(max(amax, 6 · 2^-126) / 6))`,
/// E2M1, to nearest even. The dot product of a transformed query and a transformed entry is the same up to rounding;
/// the transform spreads outliers over the groups. Rounded to `dtype` in between. The length of `row` is a power of
/// two, at least 32.
pub(super) fn index_row(row: &mut [f32], dtype: DType, quantize: bool) {
    reference::hadamard(row);
    round(row, dtype);
    if quantize {
        reference::fp4(row);
    }
}

/// Rounds to the values that a tensor of `dtype` would store.
pub(super) fn round(row: &mut [f32], dtype: DType) {
    if dtype == DType::Bf16 {
        row.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::bf16s;

    /// The experts round their input even if it is already rounded.
    #[test]
    fn rounding_an_activation_again_changes_nothing() {
        let values: Vec<f32> = bf16s(64 * 128, 3).iter().map(|v| v.to_f32()).collect();
        for largest in [0.0, 1e-5, 1e-4, 1.0, 224.0, 231.0, 232.0, 233.0, 448.0, 449.0, 30_000.0] {
            let mut once = values.clone();
            once.chunks_exact_mut(128).for_each(|group| {
                let most = group.iter().fold(f32::MIN_POSITIVE, |most, v| most.max(v.abs()));
                group.iter_mut().for_each(|v| *v *= largest / most);
            });
            let exact = once.clone();
            reference::fp8(&mut once, 128);
            assert!(largest < 1e-3 || once != exact, "nothing was rounded");
            let mut twice = once.clone();
            reference::fp8(&mut twice, 128);
            assert_eq!(once, twice, "groups up to {largest}");
        }
    }

    #[test]
    fn trap_10_the_hadamard_turn_keeps_products_and_fp4_follows_it() {
        let values: Vec<f32> = bf16s(2 * 128, 1).iter().map(|v| v.to_f32()).collect();
        let turn = |quantize| {
            let mut x = values.clone();
            x.chunks_exact_mut(128).for_each(|head| index_row(head, DType::F32, quantize));
            x
        };
        let turned = turn(false);
        let dot = |v: &[f32]| v[..128].iter().zip(&v[128..]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        assert!((dot(&turned) - dot(&values)).abs() < 1e-4);
        // By the definition of the matrix.
        for (i, got) in turned[..128].iter().enumerate() {
            let sign = |j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
            let exact: f64 = (0..128).map(|j| sign(j) * f64::from(values[j])).sum::<f64>() / 128f64.sqrt();
            assert!((f64::from(*got) - exact).abs() < 1e-5);
        }
        for (got, group) in turn(true).chunks(32).zip(turned.chunks(32)) {
            let amax = group.iter().fold(0f32, |m, v| m.max(v.abs()));
            let scale = (amax / 6.0).log2().ceil().exp2();
            for (got, value) in got.iter().zip(group) {
                let code = (got / scale).abs();
                assert!([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0].contains(&code), "{code} is no FP4 value");
                assert!((got - value).abs() <= scale, "{value} became {got}");
            }
        }
    }
}
