//! Greedy rows of `ops::sample`: one block a row.

use super::images;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// As in csrc/sample.cu.
const THREADS: usize = 1024;

pub(crate) fn argmax(exec: &mut Exec, logits: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let (rows, vocab) = logits.rows_cols();
    let launch = exec.gpu()?.launch("sample", &images::SAMPLE, "argmax")?.input(logits).output(out).u32(vocab);
    // SAFETY: matches csrc/sample.cu; the op checked the shapes.
    unsafe { launch.overlapped().run([rows, 1, 1], THREADS) }
}
