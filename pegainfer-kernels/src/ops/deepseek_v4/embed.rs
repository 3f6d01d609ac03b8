//! From token ids to residual streams.

use super::values::{activation, cpu, read, write};
use crate::cpu::deepseek_v4::hyper::STREAMS;
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::PLACEHOLDER;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Replaces placeholder ids: `PLACEHOLDER | j` becomes `previous[j]`, the token of sample `j` of the previous step, or
/// `u32::MAX`, which no vocabulary has, if there is none. `previous`: `[samples]`, `ids`: `[T]`, u32.
pub fn resolve_ids(exec: &mut Exec, previous: &Tensor, ids: &mut Tensor) -> Result<(), OpError> {
    let check = Check("resolve_ids");
    check.is(previous, DType::U32, &[previous.elements()])?;
    check.is(ids, DType::U32, &[ids.elements()])?;
    exec.record(|_| OpRecord::new("resolve_ids", "copy", &[previous, ids], &[ids], 0).with_bytes(2 * ids.bytes()));
    if exec.device() == Device::Cuda {
        return gpu::resolve_ids(exec, previous, ids);
    }
    if cpu(check, exec)?.is_some() {
        let drawn = |id: u32| previous.host::<u32>().get((id ^ PLACEHOLDER) as usize).copied().unwrap_or(u32::MAX);
        ids.host_mut::<u32>().iter_mut().filter(|id| **id & PLACEHOLDER != 0).for_each(|id| *id = drawn(*id));
    }
    Ok(())
}

/// The rows of a table that holds the ids from `first` on; zeros for other ids, so that the sum over the ranks of a
/// sharded table is the whole embedding.
///
/// `ids`: `[T]` u32; `table`: `[rows, hidden]` bf16; `out`: `[T, hidden]` bf16 or f32. Values are copied.
pub fn embed(exec: &mut Exec, ids: &Tensor, table: &Tensor, first: usize, out: &mut Tensor) -> Result<(), OpError> {
    let check = Check("embed");
    let (tokens, (rows, hidden)) = (ids.elements(), table.rows_cols());
    check.is(ids, DType::U32, &[tokens])?;
    check.is(table, DType::Bf16, &[rows, hidden])?;
    activation(check, out, &[tokens, hidden])?;
    exec.record(|_| OpRecord::new("embed", "copy", &[ids, table], &[out], 0).with_bytes(ids.bytes() + 2 * out.bytes()));
    if exec.device() == Device::Cuda {
        return gpu::embed(exec, ids, table, first, out);
    }
    if cpu(check, exec)?.is_some() {
        let mut values = vec![0.0; tokens * hidden];
        for (id, row) in ids.host::<u32>().iter().zip(values.chunks_exact_mut(hidden)) {
            let here = (*id as usize).checked_sub(first).filter(|at| *at < rows);
            if let Some(at) = here {
                let from = &table.host::<bf16>()[at * hidden..][..hidden];
                row.iter_mut().zip(from).for_each(|(v, w)| *v = w.to_f32());
            }
        }
        write(out, &values);
    }
    Ok(())
}

/// Starts every residual stream with the embedding. `x`: `[T, hidden]`; `streams`: `[T, 4, hidden]`, bf16 or f32.
pub fn expand_streams(exec: &mut Exec, x: &Tensor, streams: &mut Tensor) -> Result<(), OpError> {
    let check = Check("expand_streams");
    let (tokens, hidden) = x.rows_cols();
    activation(check, x, &[tokens, hidden])?;
    activation(check, streams, &[tokens, STREAMS, hidden])?;
    exec.record(|_| OpRecord::new("expand_streams", "copy", &[x], &[streams], 0));
    if exec.device() == Device::Cuda {
        return gpu::expand_streams(exec, x, streams);
    }
    if cpu(check, exec)?.is_some() {
        let values: Vec<f32> = read(x).chunks_exact(hidden).flat_map(|row| row.repeat(STREAMS)).collect();
        write(streams, &values);
    }
    Ok(())
}
