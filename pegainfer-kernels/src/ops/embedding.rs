//! Token ids to rows of the embedding table.

use super::check::Check;
use crate::{cpu, cuda};
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::PLACEHOLDER;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out[t] = table[ids[t]]`. An id with the bit [`PLACEHOLDER`] is looked up in `previous`: the tokens of the previous
/// step, which the host need not know yet.
///
/// `ids`: `[tokens]` u32; `previous`: `[n]` u32; `table`: `[vocab, hidden]` bf16; `out`: `[tokens, hidden]` bf16. Every
/// id and index must be inside its table; otherwise the CPU returns an error, and a GPU loses its context.
pub fn embedding(
    exec: &mut Exec,
    ids: &Tensor,
    previous: &Tensor,
    table: &Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("embedding");
    let tokens = ids.elements();
    let (vocab, hidden) = table.rows_cols();
    check.is(ids, DType::U32, &[tokens])?;
    check.is(previous, DType::U32, &[previous.elements()])?;
    check.is(table, DType::Bf16, &[vocab, hidden])?;
    check.is(out, DType::Bf16, &[tokens, hidden])?;
    exec.record(|device| {
        let bytes = ids.bytes() + 2 * out.bytes();
        OpRecord::new("embedding", cpu::rows::kernel(device), &[ids, table, previous], &[out], 0).with_bytes(bytes)
    });
    match exec.device() {
        Device::Cpu(_) => {
            let (ids, previous) = (ids.host::<u32>(), previous.host::<u32>());
            let ids = || ids.iter().map(|&id| resolve(id, previous));
            check.that(ids().all(|id| (id as usize) < vocab), "a token id is not in the vocabulary")?;
            cpu::rows::gather(table.host::<bf16>(), ids(), hidden, out.host_mut());
        }
        Device::Cuda => cuda::embedding(exec, ids, previous, table, out)?,
        Device::Meta => {}
    }
    Ok(())
}

/// Resolves a placeholder in `previous`; returns an id outside any vocabulary if it has no such row.
fn resolve(id: u32, previous: &[u32]) -> u32 {
    match id & PLACEHOLDER {
        0 => id,
        _ => previous.get((id ^ PLACEHOLDER) as usize).copied().unwrap_or(u32::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s};

    #[test]
    fn copies_the_rows_and_refuses_ids_outside_the_table() {
        Host::each(|mut host| {
            let table = host.bf16("table", &[5, 3], &bf16s(15, 1));
            let previous = host.u32("previous", &[7, 0]);
            let idx = host.u32("ids", &[4, PLACEHOLDER | 1, 4]);
            let mut out = host.zeros("out", &[3, 3], DType::Bf16);
            embedding(&mut host.exec, &idx, &previous, &table, &mut out).unwrap();
            let (t, o) = (table.host::<bf16>(), out.host::<bf16>());
            assert_eq!((&o[..3], &o[3..6], &o[6..]), (&t[12..15], &t[..3], &t[12..15]));
            for bad in [5, PLACEHOLDER, PLACEHOLDER | 2] {
                let bad = host.u32("ids", &[bad, 0, 0]);
                assert!(embedding(&mut host.exec, &bad, &previous, &table, &mut out).is_err());
            }
        });
    }
}
