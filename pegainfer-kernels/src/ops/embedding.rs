//! Token ids to rows of the embedding table.

use super::check::Check;
use crate::{cpu, cuda};
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out[t] = table[ids[t]]`.
///
/// `ids`: `[tokens]` u32, each below `vocab`; `table`: `[vocab, hidden]` bf16; `out`: `[tokens, hidden]` bf16.
pub fn embedding(exec: &mut Exec, ids: &Tensor, table: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let check = Check("embedding");
    let tokens = ids.elements();
    let (vocab, hidden) = table.rows_cols();
    check.is(ids, DType::U32, &[tokens])?;
    check.is(table, DType::Bf16, &[vocab, hidden])?;
    check.is(out, DType::Bf16, &[tokens, hidden])?;
    exec.record(|device| {
        let bytes = ids.bytes() + 2 * out.bytes();
        OpRecord::new("embedding", cpu::rows::kernel(device), &[ids, table], &[out], 0).with_bytes(bytes)
    });
    match exec.device() {
        Device::Cpu(_) => {
            let ids = ids.host::<u32>();
            check.that(ids.iter().all(|&id| (id as usize) < vocab), "a token id is not in the vocabulary")?;
            cpu::rows::gather(table.host::<bf16>(), ids, hidden, out.host_mut());
        }
        Device::Cuda => cuda::gather("embedding", exec, ids, table, out)?,
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s};

    #[test]
    fn copies_the_rows_and_refuses_ids_outside_the_table() {
        Host::each(|mut host| {
            let table = host.bf16("table", &[5, 3], &bf16s(15, 1));
            let idx = host.u32("ids", &[4, 0, 4]);
            let mut out = host.zeros("out", &[3, 3], DType::Bf16);
            embedding(&mut host.exec, &idx, &table, &mut out).unwrap();
            let (t, o) = (table.host::<bf16>(), out.host::<bf16>());
            assert_eq!((&o[..3], &o[3..6], &o[6..]), (&t[12..15], &t[..3], &t[12..15]));
            let bad = host.u32("ids", &[5, 0, 0]);
            assert!(embedding(&mut host.exec, &bad, &table, &mut out).is_err());
        });
    }
}
