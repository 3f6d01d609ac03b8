//! RMS normalisation.

use super::activation::{ActivationMut, write_host};
use super::check::Check;
use crate::cpu::norm::{self, NormWeight};
use crate::cuda;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// RMS normalisation over the last dimension: `out = x * rsqrt(mean(x²) + eps) * weight`.
///
/// `x`, `out`: `[rows, hidden]` bf16, `out` also [in FP8](super::Activation); `weight`: `[hidden]` bf16 or f32. Mean
/// and scaling are f32. With a bf16 weight the normalised value is rounded to bf16 before the weight is applied
/// (transformers `Qwen3RMSNorm`). With an f32 weight only the result is rounded (`Qwen3_5RMSNorm`, whose weight is 1
/// plus the checkpoint's `w`).
pub fn rms_norm<'o>(
    exec: &mut Exec,
    x: &Tensor,
    weight: &Tensor,
    eps: f32,
    out: impl Into<ActivationMut<'o>>,
) -> Result<(), OpError> {
    let (check, out) = (Check("rms_norm"), out.into());
    let (rows, hidden) = x.rows_cols();
    check.is(x, DType::Bf16, &[rows, hidden])?;
    check.is_norm(weight, hidden)?;
    check.is_activation(out.tensor, &[rows, hidden])?;
    let out = out.in_norm_format(exec)?;
    exec.record(|_| OpRecord::new("rms_norm", "rows", &[x, weight], &[out], 4 * x.elements() as u64));
    match exec.device() {
        Device::Cpu(isa) => {
            write_host(out, |out| norm::rms_norm(isa, x.host(), NormWeight::of(weight), eps, out));
        }
        Device::Cuda => cuda::rms_norm(exec, x, weight, eps, out)?,
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s, close};
    use half::bf16;

    fn reference(x: &[bf16], weight: &[bf16], eps: f64) -> Vec<f64> {
        let hidden = weight.len();
        x.chunks(hidden)
            .flat_map(|row| {
                let mean = row.iter().map(|v| v.to_f64().powi(2)).sum::<f64>() / hidden as f64;
                let scale = (mean + eps).sqrt().recip();
                row.iter().zip(weight).map(move |(v, w)| v.to_f64() * scale * w.to_f64()).collect::<Vec<_>>()
            })
            .collect()
    }

    #[test]
    fn matches_f64_on_ragged_shapes() {
        Host::each(|mut host| {
            for (rows, hidden) in [(1, 1), (3, 7), (5, 64), (2, 1000), (17, 320)] {
                let (x, w) = (bf16s(rows * hidden, 1), bf16s(hidden, 2));
                let (tx, tw) = (host.bf16("x", &[rows, hidden], &x), host.bf16("w", &[hidden], &w));
                let mut out = host.zeros("out", &[rows, hidden], DType::Bf16);
                rms_norm(&mut host.exec, &tx, &tw, 1e-6, &mut out).unwrap();
                // Two roundings to bf16: of the normalised value and of the result.
                close(out.host::<bf16>(), &reference(&x, &w, 1e-6), 2.0 / 256.0, 1e-6);
            }
        });
    }

    #[test]
    fn an_f32_weight_is_rounded_once() {
        Host::each(|mut host| {
            for (rows, hidden) in [(1, 1), (3, 7), (5, 64), (2, 1000)] {
                let (x, w) = (bf16s(rows * hidden, 1), bf16s(hidden, 2));
                let tx = host.bf16("x", &[rows, hidden], &x);
                // Values that bf16 does not have.
                let shifted: Vec<f32> = w.iter().map(|w| w.to_f32() + 1.001).collect();
                let mut tw = host.zeros("w", &[hidden], DType::F32);
                tw.host_mut().copy_from_slice(&shifted);
                let mut out = host.zeros("out", &[rows, hidden], DType::Bf16);
                rms_norm(&mut host.exec, &tx, &tw, 1e-6, &mut out).unwrap();
                let ones = vec![bf16::ONE; hidden];
                let normed = reference(&x, &ones, 1e-6);
                let expected: Vec<f64> =
                    normed.iter().zip(shifted.iter().cycle()).map(|(x, w)| x * f64::from(*w)).collect();
                close(out.host::<bf16>(), &expected, 1.01 / 256.0, 1e-6);
            }
        });
    }

    #[test]
    fn a_row_has_the_same_bits_in_every_batch() {
        Host::each(|mut host| {
            // Enough bytes for several tasks.
            let (rows, hidden) = (90, 1000);
            let (x, w) = (bf16s(rows * hidden, 6), bf16s(hidden, 7));
            let (tx, tw) = (host.bf16("x", &[rows, hidden], &x), host.bf16("w", &[hidden], &w));
            let mut out = host.zeros("out", &[rows, hidden], DType::Bf16);
            rms_norm(&mut host.exec, &tx, &tw, 1e-6, &mut out).unwrap();
            for (row, expected) in x.chunks(hidden).zip(out.host::<bf16>().chunks(hidden)) {
                let row = host.bf16("row", &[1, hidden], row);
                let mut alone = host.zeros("out", &[1, hidden], DType::Bf16);
                rms_norm(&mut host.exec, &row, &tw, 1e-6, &mut alone).unwrap();
                assert_eq!(alone.host::<bf16>(), expected);
            }
        });
    }
}
