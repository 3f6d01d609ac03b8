//! Logits, and the most likely token of each row.

use super::check::Check;
use crate::cpu::linear::{LinearOut, linear as cpu_linear};
use crate::cuda;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Words of a key: the complement of an id, then a number that rises with the logit. As a little-endian u64, a larger key
/// is a larger logit or, on a tie, a lower id. 0 is no token's.
pub const KEY_WORDS: usize = 2;

/// [`linear`](super::linear) with f32 results, and for each row the key of the largest, for [`sample`](super::sample).
///
/// `x`: `[rows, k]` bf16; `w`: `[n, k]` bf16; `out`: `[rows, n]` f32; `keys`: `[rows, KEY_WORDS]` u32, all zeros before. A
/// key stays 0 where the kernel does not find it on its way: on the CPU, on a GPU for many rows, and where no result is
/// more than -inf.
pub fn linear_argmax(
    exec: &mut Exec,
    x: &Tensor,
    w: &Tensor,
    out: &mut Tensor,
    keys: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("linear_argmax");
    let (m, k) = x.rows_cols();
    let n = w.rows_cols().0;
    check.is(x, DType::Bf16, &[m, k])?;
    check.is(w, DType::Bf16, &[n, k])?;
    check.is(out, DType::F32, &[m, n])?;
    check.is(keys, DType::U32, &[m, KEY_WORDS])?;
    let cuda_kernel = exec.gpu().map_or("", |gpu| cuda::linear_kernel(gpu, m, n, DType::F32));
    exec.record(|device| {
        let kernel = match device {
            Device::Cpu(isa) => isa.name(),
            Device::Cuda => cuda_kernel,
            Device::Meta => "gemm",
        };
        OpRecord::new("linear_argmax", kernel, &[x, w], &[out, keys], 2 * (m * n * k) as u64)
    });
    match exec.device() {
        Device::Cpu(isa) => {
            cpu_linear(isa, x.host(), w.host(), m, n, k, LinearOut::F32(out.host_mut()), &mut exec.scratch);
        }
        Device::Cuda => cuda::linear_argmax(exec, x, w, out, keys)?,
        Device::Meta => {}
    }
    Ok(())
}
