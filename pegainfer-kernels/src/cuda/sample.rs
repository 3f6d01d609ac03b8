//! `ops::sample` and `ops::logprobs`: a cluster of `blocks` blocks per row.

use super::abi::{Logprobs, Sample};
use super::vectors;
use crate::limits::sampling::THREADS;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

pub(crate) fn sample(
    exec: &mut Exec,
    blocks: usize,
    logits: &Tensor,
    draws: &Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (rows, vocab) = logits.rows_cols();
    vectors("sample", vocab)?;
    let launch = Sample::sample.launch(exec.gpu()?, "sample", Sample { logits, draws, out, vocab })?;
    let launch = launch.cluster(blocks).overlapped();
    // SAFETY: the op checked the shapes.
    unsafe { launch.run([rows * blocks, 1, 1], THREADS) }
}

pub(crate) fn logprobs(
    exec: &mut Exec,
    blocks: usize,
    logits: &Tensor,
    draws: &Tensor,
    sampled: &Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (rows, vocab) = logits.rows_cols();
    vectors("logprobs", vocab)?;
    let arguments = Logprobs { logits, draws, tokens: sampled, out, vocab };
    let launch = Logprobs::logprobs.launch(exec.gpu()?, "logprobs", arguments)?.cluster(blocks).overlapped();
    // SAFETY: the op checked the shapes, the tokens come from `sample`.
    unsafe { launch.run([rows * blocks, 1, 1], THREADS) }
}
