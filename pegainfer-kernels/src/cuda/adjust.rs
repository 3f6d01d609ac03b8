//! `ops::adjust_logits`: a block per row.

use super::abi;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// Threads of a block.
const THREADS: usize = 512;

pub(crate) fn adjust_logits(
    exec: &mut Exec,
    logits: &mut Tensor,
    spans: &Tensor,
    edits: &Tensor,
    masks: &Tensor,
) -> Result<(), OpError> {
    let (rows, vocab) = logits.rows_cols();
    let arguments = abi::Adjust { logits, spans, edits, masks, vocab };
    let launch = abi::Adjust::adjust.launch(exec.gpu()?, "adjust_logits", arguments)?;
    // SAFETY: the op checked the shapes, `PackedLogitsUpdates` keeps spans within them, the kernel checks the tokens.
    unsafe { launch.run([rows, 1, 1], THREADS) }
}
