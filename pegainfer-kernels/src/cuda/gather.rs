//! Row copies: `ops::embedding`, `ops::gather_rows`.

use super::abi::{Embedding, Gather};
use super::vectors;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

pub(crate) fn gather(
    op: &'static str,
    exec: &mut Exec,
    ids: &Tensor,
    from: &Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (rows, width) = out.rows_cols();
    let from_rows = from.rows_cols().0;
    vectors(op, width)?;
    let launch = Gather::gather.launch(exec.gpu()?, op, Gather { from, ids, out, from_rows, width })?;
    // SAFETY: the op checked the shapes, the kernel checks the ids.
    unsafe { launch.overlapped().run([rows, 1, 1], threads(width)) }
}

pub(crate) fn embedding(
    exec: &mut Exec,
    ids: &Tensor,
    previous: &Tensor,
    table: &Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (op, (rows, width)) = ("embedding", out.rows_cols());
    vectors(op, width)?;
    let (vocab, previous_rows) = (table.rows_cols().0, previous.elements());
    let arguments = Embedding { table, ids, previous, out, vocab, previous_rows, width };
    let launch = Embedding::embedding.launch(exec.gpu()?, op, arguments)?;
    // SAFETY: as in `gather`.
    unsafe { launch.overlapped().run([rows, 1, 1], threads(width)) }
}

/// Threads of a block that copies a row, 16 bytes each at a time.
fn threads(width: usize) -> usize {
    (width / 8).clamp(32, 256)
}
