//! Dummy weights: `ops::uniform` and `ops::random_bytes`.

use super::abi::{RandomBytes, Uniform};
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

/// `out`: whole words of eight bytes.
pub(crate) fn random_bytes(exec: &mut Exec, seed: u64, mask: u8, out: &mut Tensor) -> Result<(), OpError> {
    let words = out.elements() as u64 / 8;
    let arguments = RandomBytes { out, seed, words, mask: usize::from(mask) };
    let launch = RandomBytes::random_bytes.launch(exec.gpu()?, "random_bytes", arguments)?;
    // SAFETY: `out` is whole words, aligned to them.
    unsafe { launch.run([(words as usize).div_ceil(THREADS), 1, 1], THREADS) }
}
