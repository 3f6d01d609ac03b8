//! Picks the tokens that need logits.

use super::values::{activation, cpu, read, write};
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out[i] = x[rows[i]]`. `x`: `[T, ...]`; `rows`: `[n]` u32, each below `T`; `out`: `[n, ...]`, bf16 or f32.
pub fn pick_rows(exec: &mut Exec, x: &Tensor, rows: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let check = Check("pick_rows");
    let (tokens, width) = x.rows_cols();
    activation(check, x, x.shape())?;
    check.is(rows, DType::U32, &[rows.elements()])?;
    check.is(out, x.dtype(), &[&[rows.elements()], &x.shape()[1..]].concat())?;
    exec.record(|_| {
        OpRecord::new("pick_rows", "copy", &[x, rows], &[out], 0).with_bytes(rows.bytes() + 2 * out.bytes())
    });
    if exec.device() == Device::Cuda {
        return gpu::pick_rows(exec, x, rows, out);
    }
    if cpu(check, exec)?.is_some() {
        check.that(rows.host::<u32>().iter().all(|row| (*row as usize) < tokens), "a row is not in x")?;
        let x = read(x);
        let picked = rows.host::<u32>().iter().flat_map(|row| &x[*row as usize * width..][..width]);
        write(out, &picked.copied().collect::<Vec<_>>());
    }
    Ok(())
}
