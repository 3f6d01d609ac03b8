//! `ops::write_runs`: a block per run.

use super::abi::WriteRuns;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// Threads of a block. Most runs are one word; the longest ones are a few hundred.
const THREADS: usize = 128;

pub(crate) fn write_runs(exec: &mut Exec, runs: &Tensor, words: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let (count, word_count, elements) = (runs.rows_cols().0, words.elements(), out.elements());
    let arguments = WriteRuns { runs, words, out, word_count, elements };
    let launch = WriteRuns::write_runs.launch(exec.gpu()?, "write_runs", arguments)?;
    // Serialised, because earlier kernels may still read what it overwrites.
    // SAFETY: the op checked the shapes, the kernel checks the runs.
    unsafe { launch.run([count, 1, 1], THREADS) }
}
