//! Dummy weights: `ops::uniform`.

use super::abi::Uniform;
use super::vectors;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

const THREADS: usize = 256;

pub(crate) fn uniform(exec: &mut Exec, seed: u64, limit: f32, out: &mut Tensor) -> Result<(), OpError> {
    let op = "uniform";
    vectors(op, out.rows_cols().1)?;
    let groups = out.elements() / 4;
    let launch = Uniform::uniform.launch(exec.gpu()?, op, Uniform { out, seed, groups, limit })?;
    // SAFETY: rows are multiples of 8 elements, so `out` is whole groups and 16-byte aligned.
    unsafe { launch.run([groups.div_ceil(THREADS), 1, 1], THREADS) }
}
