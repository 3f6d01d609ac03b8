//! Dummy weights: `ops::uniform`.

use super::{images, vectors};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

const THREADS: usize = 256;

pub(crate) fn uniform(exec: &mut Exec, seed: u64, limit: f32, out: &mut Tensor) -> Result<(), OpError> {
    let op = "uniform";
    vectors(op, out.rows_cols().1)?;
    let groups = out.elements() / 4;
    let launch = exec.gpu()?.launch(op, &images::DUMMY, "uniform")?;
    let launch = launch.output(out).u64(seed).u32(groups).f32(limit);
    // SAFETY: matches csrc/dummy.cu; rows are multiples of 8 elements, so `out` is whole groups and 16-byte aligned.
    unsafe { launch.run([groups.div_ceil(THREADS), 1, 1], THREADS) }
}
