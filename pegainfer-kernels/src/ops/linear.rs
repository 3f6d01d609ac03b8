//! GEMM with a weight of the checkpoint.

use super::check::Check;
use crate::choice::{self, Gemm, GemmShape, Output};
use crate::cpu::linear::{LinearOut, linear as cpu_linear};
use crate::cuda;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out = x · wᵀ`.
///
/// `x`: `[rows, k]` bf16; `w`: `[n, k]` bf16, row-major as in the checkpoint; `out`: `[rows, n]` bf16 (activations) or
/// f32 (logits). f32 accumulation, one rounding at the end. A row's result does not depend on the other rows; on a GPU
/// it does on how many there are, because that chooses the kernel and with it the order of the sum. A GPU takes `k` and
/// `n` in multiples of 8.
pub fn linear(exec: &mut Exec, x: &Tensor, w: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let check = Check("linear");
    let (m, k) = x.rows_cols();
    let n = w.rows_cols().0;
    check.is(x, DType::Bf16, &[m, k])?;
    check.is(w, DType::Bf16, &[n, k])?;
    check.that(matches!(out.dtype(), DType::Bf16 | DType::F32), "out must be bf16 or f32")?;
    check.is(out, out.dtype(), &[m, n])?;
    let output = if out.dtype() == DType::F32 { Output::F32 } else { Output::Bf16 };
    let gemm = choice::gpu(exec)?.map(|gpu| Gemm::choose(&gpu, GemmShape { m, n, k, output }));
    exec.record(|device| {
        let kernel = choice::name(device, &gemm, Gemm::name);
        OpRecord::new("linear", kernel, &[x, w], &[out], 2 * (m * n * k) as u64)
    });
    match (exec.device(), &gemm) {
        (Device::Cpu(isa), _) => {
            let (x, w) = (x.host::<bf16>(), w.host::<bf16>());
            let out = match out.dtype() {
                DType::F32 => LinearOut::F32(out.host_mut()),
                _ => LinearOut::Bf16(out.host_mut()),
            };
            cpu_linear(isa, x, w, m, n, k, out, &mut exec.scratch);
        }
        (Device::Cuda, Some(gemm)) => cuda::linear(exec, "linear", gemm, x, w, out)?,
        _ => {}
    }
    Ok(())
}
