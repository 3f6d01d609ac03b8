//! Row copies: `ops::embedding`, `ops::gather_rows`.

use super::{images, vectors};
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
    let launch = exec.gpu()?.launch(op, &images::GATHER, "gather")?;
    let launch = launch.input(from).input(ids).output(out).u32(from_rows).u32(width);
    // SAFETY: matches csrc/gather.cu; the op checked the shapes, the kernel checks the ids.
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
    let launch = exec.gpu()?.launch(op, &images::GATHER, "embedding")?;
    let launch = launch.input(table).input(ids).input(previous).output(out);
    let launch = launch.u32(table.rows_cols().0).u32(previous.elements()).u32(width);
    // SAFETY: as in `gather`.
    unsafe { launch.overlapped().run([rows, 1, 1], threads(width)) }
}

/// Threads of a block that copies a row, 16 bytes each at a time.
fn threads(width: usize) -> usize {
    (width / 8).clamp(32, 256)
}
