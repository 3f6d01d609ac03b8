//! `ops::sample` and `ops::logprobs`: a cluster of `blocks` blocks a row.

use super::{images, vectors};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// As in csrc/row.cuh.
const THREADS: usize = 512;

pub(crate) fn sample(
    exec: &mut Exec,
    blocks: usize,
    logits: &Tensor,
    draws: &Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (rows, vocab) = logits.rows_cols();
    vectors("sample", vocab)?;
    let launch = exec.gpu()?.launch("sample", &images::SAMPLE, "sample")?.cluster(blocks).overlapped();
    let launch = launch.input(logits).input(draws).output(out).u32(vocab);
    // SAFETY: matches csrc/sample.cu; the op checked the shapes.
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
    let launch = exec.gpu()?.launch("logprobs", &images::LOGPROBS, "logprobs")?.cluster(blocks).overlapped();
    let launch = launch.input(logits).input(draws).input(sampled).output(out).u32(vocab);
    // SAFETY: matches csrc/logprobs.cu; the op checked the shapes, the tokens come from `sample`.
    unsafe { launch.run([rows * blocks, 1, 1], THREADS) }
}
