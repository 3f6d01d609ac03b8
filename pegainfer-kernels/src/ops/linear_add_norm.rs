//! The end of a block: its last projection, the residual add, and the norm before the next block.

use super::activation::{ActivationMut, host_values, write_host};
use super::check::Check;
use super::matrix::MatrixRef;
use crate::choice::{self, AddNorm};
use crate::cpu::linear::{LinearOut, linear_stacked};
use crate::cpu::norm::{self, NormWeight};
use crate::cuda;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `residual += x · wᵀ`, then `out = rms_norm(residual) * norm`.
///
/// `x`: `[rows, k]`, `w`: `[hidden, k]`, `residual`, `delta`, `out`: `[rows, hidden]`, all bf16; `w` also FP8 as in
/// [`linear`](super::linear), `x` and `out` also [in FP8](super::Activation); `norm`: `[hidden]` bf16 or f32, as in
/// [`rms_norm`](super::rms_norm). `delta` is scratch for the GEMM with device-dependent contents. The GEMM is rounded
/// to bf16 before it is added, and the sum before it is normalised, as in transformers; with many rows, a GPU rounds
/// only the sum.
#[expect(clippy::too_many_arguments, reason = "the operands of the op")]
pub fn linear_add_norm<'w, 'o>(
    exec: &mut Exec,
    x: &Tensor,
    w: impl Into<MatrixRef<'w>>,
    residual: &mut Tensor,
    norm: &Tensor,
    eps: f32,
    delta: &mut Tensor,
    out: impl Into<ActivationMut<'o>>,
) -> Result<(), OpError> {
    let check = Check("linear_add_norm");
    let (m, k) = x.rows_cols();
    let (w, out) = (w.into(), out.into());
    let n = w.shape().0;
    check.is_activation(x, &[m, k])?;
    w.check_dense(check, exec.device(), (n, k))?;
    for tensor in [&*residual, &*delta] {
        check.is(tensor, DType::Bf16, &[m, n])?;
    }
    check.is_activation(out.tensor, &[m, n])?;
    check.is_norm(norm, n)?;
    let choice = choice::gpu(exec)?.map(|gpu| AddNorm::choose(&gpu, (m, n, k), w.format()));
    let out = out.in_norm_format(exec)?;
    exec.record(|device| {
        let kernel = choice::name(device, &choice, AddNorm::name);
        let flops = 2 * (m * n * k) as u64 + 5 * (m * n) as u64;
        OpRecord::new("linear_add_norm", kernel, &w.reads(&[x], &[residual, norm]), &[residual, out], flops)
    });
    match (exec.device(), &choice) {
        (Device::Cpu(isa), _) => {
            let gemm = LinearOut::Bf16(delta.host_mut());
            let path = (isa, exec.activations());
            linear_stacked(path, &host_values(x), &w.weights(), (m, k), gemm, &mut exec.scratch);
            let (delta, residual, norm) = (delta.host(), residual.host_mut(), NormWeight::of(norm));
            write_host(out, |out| norm::add_rms_norm(isa, delta, residual, norm, eps, out));
        }
        (Device::Cuda, Some(choice)) => {
            cuda::linear_add_norm(exec, choice, x, w, residual, norm, eps, delta, out)?;
        }
        _ => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{linear, rms_norm};
    use crate::testing::{Host, bf16s};
    use half::bf16;

    #[test]
    fn it_is_a_gemm_an_add_and_a_norm() {
        Host::each(|mut host| {
            let (m, n, k) = (4, 136, 72);
            let (x, w) = (host.bf16("x", &[m, k], &bf16s(m * k, 3)), host.bf16("w", &[n, k], &bf16s(n * k, 4)));
            let (before, norm) = (bf16s(m * n, 5), host.bf16("norm", &[n], &bf16s(n, 6)));
            let mut residual = host.bf16("residual", &[m, n], &before);
            let mut delta = host.zeros("delta", &[m, n], DType::Bf16);
            let mut out = host.zeros("out", &[m, n], DType::Bf16);
            linear_add_norm(&mut host.exec, &x, &w, &mut residual, &norm, 1e-6, &mut delta, &mut out).unwrap();
            let mut gemm = host.zeros("gemm", &[m, n], DType::Bf16);
            linear(&mut host.exec, &x, &w, &mut gemm).unwrap();
            let add = |(a, b): (&bf16, &bf16)| bf16::from_f32(a.to_f32() + b.to_f32());
            let sum: Vec<bf16> = gemm.host::<bf16>().iter().zip(&before).map(add).collect();
            assert_eq!(residual.host::<bf16>(), sum);
            let mut plain = host.zeros("plain", &[m, n], DType::Bf16);
            rms_norm(&mut host.exec, &residual, &norm, 1e-6, &mut plain).unwrap();
            assert_eq!(out.host::<bf16>(), plain.host::<bf16>());
        });
    }
}
