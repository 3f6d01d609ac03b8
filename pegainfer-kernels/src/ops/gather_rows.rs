//! Picks the rows that need logits.

use super::check::Check;
use crate::{cpu, cuda};
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out[i] = x[rows[i]]`.
///
/// `x`: `[tokens, hidden]` bf16; `rows`: `[n]` u32, each below `tokens`; `out`: `[n, hidden]` bf16.
pub fn gather_rows(exec: &mut Exec, x: &Tensor, rows: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let check = Check("gather_rows");
    let n = rows.elements();
    let (tokens, hidden) = x.rows_cols();
    check.is(x, DType::Bf16, &[tokens, hidden])?;
    check.is(rows, DType::U32, &[n])?;
    check.is(out, DType::Bf16, &[n, hidden])?;
    exec.record(|device| {
        let bytes = rows.bytes() + 2 * out.bytes();
        OpRecord::new("gather_rows", cpu::rows::kernel(device), &[x, rows], &[out], 0).with_bytes(bytes)
    });
    match exec.device() {
        Device::Cpu(_) => {
            let rows = rows.host::<u32>();
            check.that(rows.iter().all(|&row| (row as usize) < tokens), "a row is not in x")?;
            cpu::rows::gather(x.host::<bf16>(), rows.iter().copied(), hidden, out.host_mut());
        }
        Device::Cuda => cuda::gather("gather_rows", exec, rows, x, out)?,
        Device::Meta => {}
    }
    Ok(())
}
