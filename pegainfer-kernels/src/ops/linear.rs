//! GEMM with a weight of the checkpoint.

use super::activation::host_values;
use super::check::Check;
use super::matrix::MatrixRef;
use crate::choice::{self, Gemm, GemmShape, Output};
use crate::cpu::linear::{LinearOut, linear_stacked};
use crate::cuda;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out = x · wᵀ`.
///
/// `x`: `[rows, k]` bf16, or [in FP8](super::Activation); `w`: `[n, k]` bf16 or FP8, row-major as in the checkpoint;
/// `out`: `[rows, n]` bf16 (activations) or f32 (logits). f32 accumulation with one final rounding. A row's result does
/// not depend on the other rows; on a GPU it depends on their number, which chooses the kernel and with it the order of
/// the sum. A GPU takes `k` and `n` in multiples of 8.
///
/// The codes of an FP8 `w` are exact in bf16: each block of 128 along `k` is summed in f32 without the scale,
/// multiplied by it, and added to the previous blocks (W8A16). If `k` is in whole blocks, a GPU of compute capability
/// 9.0 also rounds `x` to FP8, with a scale for each 128 columns of a row, as [`quantize_fp8`](super::quantize_fp8)
/// rounds weights (W8A8). Otherwise a GPU rounds `w` to bf16.
///
/// Kernels of few rows of `x` take the codes of a group-quantised `w` exactly, and apply scales to sums. For more rows a GPU
/// rounds `w` to bf16; with [`Exec::activations`] that round prompts, Hopper instead rounds `x` to FP8 (W4A8) if `w` has
/// integers of four bits in groups of 128 columns or more.
pub fn linear<'w>(exec: &mut Exec, x: &Tensor, w: impl Into<MatrixRef<'w>>, out: &mut Tensor) -> Result<(), OpError> {
    let check = Check("linear");
    let (m, k) = x.rows_cols();
    let w = w.into();
    let n = w.shape().0;
    check.is_activation(x, &[m, k])?;
    w.check_dense(check, exec.device(), (n, k))?;
    check.that(matches!(out.dtype(), DType::Bf16 | DType::F32), "out must be bf16 or f32")?;
    check.is(out, out.dtype(), &[m, n])?;
    let output = if out.dtype() == DType::F32 { Output::F32 } else { Output::Bf16 };
    let gemm = choice::gpu(exec)?.map(|gpu| Gemm::choose(&gpu, GemmShape { m, n, k, output, format: w.format() }));
    exec.record(|device| {
        let kernel = choice::name(device, &gemm, Gemm::name);
        OpRecord::new("linear", kernel, &w.reads(&[x], &[]), &[out], 2 * (m * n * k) as u64)
    });
    match (exec.device(), &gemm) {
        (Device::Cpu(isa), _) => {
            let out = match out.dtype() {
                DType::F32 => LinearOut::F32(out.host_mut()),
                _ => LinearOut::Bf16(out.host_mut()),
            };
            let path = (isa, exec.activations());
            linear_stacked(path, &host_values(x), &w.weights(), (m, k), out, &mut exec.scratch);
        }
        (Device::Cuda, Some(gemm)) => cuda::linear(exec, "linear", gemm, x, w, out)?,
        _ => {}
    }
    Ok(())
}
