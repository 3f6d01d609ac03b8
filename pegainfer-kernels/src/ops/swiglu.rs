//! The gated activation of an MLP, after a projection that is not fused with it.

use super::activation::{ActivationMut, write_host};
use super::check::Check;
use crate::cpu::swiglu as reference;
use crate::cuda;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out = silu(gate) * up` with `silu(z) = z / (1 + exp(-z))`.
///
/// `gate_up`: `[rows, 2 * width]` bf16, the columns of the gate first; `out`: `[rows, width]` bf16, or [in
/// FP8](super::Activation). Rounded as in [`linear_swiglu`](super::linear_swiglu), which computes `gate_up` as well.
pub fn swiglu<'o>(exec: &mut Exec, gate_up: &Tensor, out: impl Into<ActivationMut<'o>>) -> Result<(), OpError> {
    let (check, out) = (Check("swiglu"), out.into());
    let (m, width) = out.tensor.rows_cols();
    check.is(gate_up, DType::Bf16, &[m, 2 * width])?;
    check.is_activation(out.tensor, &[m, width])?;
    let out = out.in_format(exec, true)?;
    exec.record(|device| {
        let kernel = if let Device::Cpu(isa) = device { isa.name() } else { "rows" };
        OpRecord::new("swiglu", kernel, &[gate_up], &[out], 5 * (m * width) as u64)
    });
    match exec.device() {
        Device::Cpu(isa) => write_host(out, |out| reference::swiglu(isa, gate_up.host(), width, out)),
        Device::Cuda => cuda::swiglu(exec, gate_up, out)?,
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{linear, linear_swiglu};
    use crate::testing::{Host, bf16s};
    use half::bf16;

    #[test]
    fn after_a_gemm_it_is_the_fused_op() {
        Host::each(|mut host| {
            let (m, k, width) = (5, 24, 40);
            let (x, w) =
                (host.bf16("x", &[m, k], &bf16s(m * k, 1)), host.bf16("w", &[2 * width, k], &bf16s(2 * width * k, 2)));
            let mut gate_up = host.zeros("gate_up", &[m, 2 * width], DType::Bf16);
            let [mut fused, mut out] = ["fused", "out"].map(|name| host.zeros(name, &[m, width], DType::Bf16));
            linear_swiglu(&mut host.exec, &x, &w, &mut gate_up, &mut fused).unwrap();
            linear(&mut host.exec, &x, &w, &mut gate_up).unwrap();
            swiglu(&mut host.exec, &gate_up, &mut out).unwrap();
            assert_eq!(out.host::<bf16>(), fused.host::<bf16>());
        });
    }
}
