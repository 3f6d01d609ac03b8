//! Residual add and RMS normalisation.

use super::activation::{ActivationMut, write_host};
use super::check::Check;
use crate::cpu::norm::{self, NormWeight};
use crate::cuda;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `residual += x`, then `out = rms_norm(residual) * norm`.
///
/// `x`, `residual`, `out`: `[rows, hidden]` bf16, `out` also [in FP8](super::Activation); `norm`: `[hidden]` bf16 or
/// f32, as in [`rms_norm`](super::rms_norm). The sum is rounded to bf16 before it is normalised. Fails if a shape or
/// dtype differs.
pub fn add_rms_norm<'o>(
    exec: &mut Exec,
    x: &Tensor,
    residual: &mut Tensor,
    norm: &Tensor,
    eps: f32,
    out: impl Into<ActivationMut<'o>>,
) -> Result<(), OpError> {
    let (check, out) = (Check("add_rms_norm"), out.into());
    let (rows, hidden) = x.rows_cols();
    check.is(x, DType::Bf16, &[rows, hidden])?;
    check.is(residual, DType::Bf16, &[rows, hidden])?;
    check.is_activation(out.tensor, &[rows, hidden])?;
    check.is_norm(norm, hidden)?;
    let out = out.in_norm_format(exec)?;
    let flops = 5 * x.elements() as u64;
    exec.record(|_| OpRecord::new("add_rms_norm", "rows", &[x, residual, norm], &[residual, out], flops));
    match exec.device() {
        Device::Cpu(isa) => {
            let (x, residual, norm) = (x.host(), residual.host_mut(), NormWeight::of(norm));
            write_host(out, |out| norm::add_rms_norm(isa, x, residual, norm, eps, out));
        }
        Device::Cuda => cuda::add_rms_norm(exec, "add_rms_norm", x, residual, norm, eps, out)?,
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::rms_norm;
    use crate::testing::{Host, bf16s};
    use half::bf16;

    #[test]
    fn it_is_an_add_and_a_norm() {
        Host::each(|mut host| {
            let (rows, hidden) = (3, 136);
            let (x, before) = (bf16s(rows * hidden, 1), bf16s(rows * hidden, 2));
            let tensor = host.bf16("x", &[rows, hidden], &x);
            let norm = host.bf16("norm", &[hidden], &bf16s(hidden, 3));
            let mut residual = host.bf16("residual", &[rows, hidden], &before);
            let mut out = [0, 1].map(|_| host.zeros("out", &[rows, hidden], DType::Bf16));
            add_rms_norm(&mut host.exec, &tensor, &mut residual, &norm, 1e-6, &mut out[0]).unwrap();
            let add = |(a, b): (&bf16, &bf16)| bf16::from_f32(a.to_f32() + b.to_f32());
            let sum: Vec<bf16> = x.iter().zip(&before).map(add).collect();
            assert_eq!(residual.host::<bf16>(), sum);
            rms_norm(&mut host.exec, &residual, &norm, 1e-6, &mut out[1]).unwrap();
            assert_eq!(out[0].host::<bf16>(), out[1].host::<bf16>());
        });
    }

    #[test]
    fn another_shape_is_refused() {
        Host::each(|mut host| {
            let x = host.zeros("x", &[2, 8], DType::Bf16);
            let norm = host.zeros("norm", &[8], DType::Bf16);
            let mut residual = host.zeros("residual", &[3, 8], DType::Bf16);
            let mut out = host.zeros("out", &[2, 8], DType::Bf16);
            let error = add_rms_norm(&mut host.exec, &x, &mut residual, &norm, 1e-6, &mut out).unwrap_err();
            assert!(error.to_string().contains("residual is"), "{error}");
        });
    }
}
