//! Layer normalisation.

use super::operands::is_values;
use crate::cpu::vision::layer_norm as cpu;
use crate::cuda;
use crate::ops::check::Check;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Layer normalisation over the last dimension (Ba et al. 2016):
/// `out = (x - mean(x)) * rsqrt(mean((x - mean(x))²) + eps) * weight + bias`.
///
/// `x`, `out`: `[rows, hidden]`, both bf16 or both f32; `weight`, `bias`: `[hidden]` f32. Mean, variance and scaling
/// are f32, the variance from differences to the mean, with one final rounding. A row does not depend on the others.
///
/// # Errors
/// Wrong shapes or dtypes.
pub fn layer_norm(
    exec: &mut Exec,
    x: &Tensor,
    (weight, bias): (&Tensor, &Tensor),
    eps: f32,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("layer_norm");
    let (rows, hidden) = x.rows_cols();
    is_values(check, x, &[rows, hidden])?;
    check.is(weight, DType::F32, &[hidden])?;
    check.is(bias, DType::F32, &[hidden])?;
    check.is(out, x.dtype(), &[rows, hidden])?;
    exec.record(|_| OpRecord::new(check.0, "rows", &[x, weight, bias], &[out], 8 * x.elements() as u64));
    let parameters = || (weight.host(), bias.host());
    match exec.device() {
        Device::Cpu(isa) => match x.dtype() {
            DType::F32 => cpu::layer_norm::<f32>(isa, x.host(), parameters(), eps, out.host_mut()),
            _ => cpu::layer_norm::<bf16>(isa, x.host(), parameters(), eps, out.host_mut()),
        },
        Device::Cuda => cuda::vision::layer_norm(exec, x, (weight, bias), eps, out)?,
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s, close};

    const EPS: f64 = 1e-6;

    fn reference(x: &[f64], weight: &[f32], bias: &[f32]) -> Vec<f64> {
        let hidden = weight.len();
        let row = |row: &[f64]| {
            let mean = row.iter().sum::<f64>() / hidden as f64;
            let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / hidden as f64;
            let scale = (variance + EPS).sqrt().recip();
            let parameters = weight.iter().zip(bias);
            row.iter()
                .zip(parameters)
                .map(|(v, (w, b))| (v - mean) * scale * f64::from(*w) + f64::from(*b))
                .collect::<Vec<_>>()
        };
        x.chunks(hidden).flat_map(row).collect()
    }

    #[test]
    fn matches_f64_on_ragged_shapes_in_both_types() {
        Host::each(|mut host| {
            for (rows, hidden) in [(1, 1), (3, 7), (5, 64), (2, 1000), (17, 144)] {
                // A mean far from 0, so that a variance from squares would be wrong.
                let x: Vec<f32> = bf16s(rows * hidden, 1).iter().map(|x| 40.0 + x.to_f32()).collect();
                let parameters = [2, 3].map(|seed| bf16s(hidden, seed).iter().map(|x| x.to_f32()).collect::<Vec<_>>());
                let [weight, bias] = ["weight", "bias"].map(|name| host.zeros(name, &[hidden], DType::F32));
                let (mut weight, mut bias) = (weight, bias);
                weight.host_mut::<f32>().copy_from_slice(&parameters[0]);
                bias.host_mut::<f32>().copy_from_slice(&parameters[1]);
                let mut tx = host.zeros("x", &[rows, hidden], DType::F32);
                tx.host_mut::<f32>().copy_from_slice(&x);
                let mut out = host.zeros("out", &[rows, hidden], DType::F32);
                layer_norm(&mut host.exec, &tx, (&weight, &bias), EPS as f32, &mut out).unwrap();
                let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
                let expected = reference(&wide, &parameters[0], &parameters[1]);
                for (got, expected) in out.host::<f32>().iter().zip(&expected) {
                    assert!((f64::from(*got) - expected).abs() < 3e-5, "{got} {expected}");
                }
                let rounded: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
                let tx = host.bf16("x", &[rows, hidden], &rounded);
                let mut out = host.zeros("out", &[rows, hidden], DType::Bf16);
                layer_norm(&mut host.exec, &tx, (&weight, &bias), EPS as f32, &mut out).unwrap();
                let wide: Vec<f64> = rounded.iter().map(|x| x.to_f64()).collect();
                close(out.host::<bf16>(), &reference(&wide, &parameters[0], &parameters[1]), 1.01 / 256.0, 1e-4);
            }
        });
    }

    #[test]
    fn epsilon_counts() {
        let mut host = Host { exec: Exec::cpu(pegainfer_core::isa::Isa::best(), Some(1)).unwrap() };
        let x = host.bf16("x", &[1, 2], &[bf16::from_f32(-1e-3), bf16::from_f32(1e-3)]);
        let (mut weight, bias) = (host.zeros("weight", &[2], DType::F32), host.zeros("bias", &[2], DType::F32));
        weight.host_mut::<f32>().fill(1.0);
        let mut out = host.zeros("out", &[1, 2], DType::Bf16);
        layer_norm(&mut host.exec, &x, (&weight, &bias), 1e-6, &mut out).unwrap();
        close(out.host::<bf16>(), &[-0.5f64.sqrt(), 0.5f64.sqrt()], 1.0 / 128.0, 0.0);
    }
}
