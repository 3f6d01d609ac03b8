//! `ops::count_tokens`, a block an update, and `ops::penalize`, a thread for each vector of counts of a row.

use super::abi;
use crate::limits::penalties::{COUNTS, THREADS};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

pub(crate) fn count_tokens(
    exec: &mut Exec,
    counts: &mut Tensor,
    updates: &Tensor,
    tokens: &Tensor,
    sampled: &Tensor,
    vocab: usize,
) -> Result<(), OpError> {
    let (blocks, words, samples) = (updates.rows_cols().0, counts.rows_cols().1, sampled.elements());
    let arguments = abi::CountTokens { counts, updates, tokens, sampled, words, vocab, samples };
    let launch = abi::CountTokens::count_tokens.launch(exec.gpu()?, "count_tokens", arguments)?;
    // SAFETY: the op checked the shapes, `PackedCountUpdates` keeps spans and slots within them, the kernel checks the
    // tokens.
    unsafe { launch.run([blocks, 1, 1], THREADS) }
}

pub(crate) fn penalize(
    exec: &mut Exec,
    logits: &mut Tensor,
    counts: &Tensor,
    penalties: &Tensor,
    drafts: &Tensor,
) -> Result<(), OpError> {
    let ((rows, vocab), words) = (logits.rows_cols(), counts.rows_cols().1);
    let arguments = abi::Penalize { logits, counts, penalties, drafts, vocab, words };
    let launch = abi::Penalize::penalize.launch(exec.gpu()?, "penalize", arguments)?;
    // SAFETY: the op checked the shapes, `PackedPenalties` keeps spans and slots within them.
    unsafe { launch.run([vocab.div_ceil(COUNTS * THREADS), rows, 1], THREADS) }
}
