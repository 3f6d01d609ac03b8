//! `ops::sample` and `ops::logprobs`: a cluster of blocks a row.

use super::{images, pieces};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// As in csrc/row.cuh.
const THREADS: usize = 512;

/// Blocks of a row: the whole GPU shares few rows; with many, small clusters waste less of it.
fn blocks(rows: usize, multiprocessors: usize, capability: (i32, i32)) -> usize {
    match capability.0 {
        // No clusters.
        ..9 => 1,
        // More than 8 blocks need large groups of multiprocessors, which GPUs for data centres have.
        9 | 10 if 16 * rows <= multiprocessors => 16,
        _ if 8 * rows <= multiprocessors => 8,
        _ => 4,
    }
}

pub(crate) fn sample(exec: &mut Exec, logits: &Tensor, draws: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let (rows, vocab) = logits.rows_cols();
    pieces("sample", vocab)?;
    let gpu = exec.gpu()?;
    let blocks = blocks(rows, gpu.multiprocessors(), gpu.capability());
    let launch = gpu.launch("sample", &images::SAMPLE, "sample")?.cluster(blocks).overlapped();
    let launch = launch.input(logits).input(draws).output(out).u32(vocab);
    // SAFETY: matches csrc/sample.cu; the op checked the shapes.
    unsafe { launch.run([rows * blocks, 1, 1], THREADS) }
}

pub(crate) fn logprobs(
    exec: &mut Exec,
    logits: &Tensor,
    draws: &Tensor,
    sampled: &Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (rows, vocab) = logits.rows_cols();
    pieces("logprobs", vocab)?;
    let gpu = exec.gpu()?;
    let blocks = blocks(rows, gpu.multiprocessors(), gpu.capability());
    let launch = gpu.launch("logprobs", &images::LOGPROBS, "logprobs")?.cluster(blocks).overlapped();
    let launch = launch.input(logits).input(draws).input(sampled).output(out).u32(vocab);
    // SAFETY: matches csrc/logprobs.cu; the op checked the shapes, the tokens come from `sample`.
    unsafe { launch.run([rows * blocks, 1, 1], THREADS) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_fit_the_gpu() {
        assert_eq!([1, 8, 9, 16, 17, 128].map(|rows| blocks(rows, 132, (9, 0))), [16, 16, 8, 8, 4, 4]);
        assert_eq!([1, 8, 128].map(|rows| blocks(rows, 108, (8, 0))), [1, 1, 1]);
        assert_eq!(blocks(1, 170, (12, 0)), 8);
    }
}
