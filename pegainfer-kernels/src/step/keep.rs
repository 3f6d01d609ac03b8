//! The last layer goes on with what is sampled.

use crate::ops;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// Narrows the first tensor of each pair, `[tokens, width]` bf16, to `rows` (`[n]` u32, each below `tokens`). It changes
/// places with the second, which has room for as much and whose values are lost.
pub fn keep_rows<const N: usize>(
    exec: &mut Exec,
    rows: &Tensor,
    pairs: [(&mut Tensor, &mut Tensor); N],
) -> Result<(), OpError> {
    for (tensor, room) in pairs {
        room.set_rows(rows.elements());
        ops::gather_rows(exec, tensor, rows, room)?;
        std::mem::swap(tensor, room);
    }
    Ok(())
}
