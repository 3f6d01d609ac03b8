//! Measures how fast this GPU reads its memory, the lower bound of a decode step.

use super::abi::ReadAll;
use crate::limits::read::THREADS;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError};
use std::time::Instant;

/// Blocks per multiprocessor: all threads that it can hold.
const BLOCKS: usize = 4;

/// Bytes a second of a plain read of `bytes` bytes, the best of five.
pub fn read_bandwidth(exec: &mut Exec, bytes: u64) -> Result<f64, OpError> {
    let op = "read";
    let vectors = (bytes / 16) as usize;
    let allocated = |e: std::io::Error| OpError { op, message: e.to_string() };
    let data = exec.tensor("read", &[8 * vectors], DType::Bf16).map_err(allocated)?;
    let mut out = exec.tensor("out", &[1], DType::Bf16).map_err(allocated)?;
    let gpu = exec.gpu()?;
    let grid = [gpu.multiprocessors() * BLOCKS, 1, 1];
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        gpu.synchronize(op)?;
        let start = Instant::now();
        let arguments = ReadAll { data: &data, out: &mut out, vectors };
        let launch = ReadAll::read_all.launch(gpu, op, arguments)?;
        // SAFETY: `data` has `vectors` vectors of 8.
        unsafe { launch.run(grid, THREADS)? };
        gpu.synchronize(op)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok((16 * vectors) as f64 / best)
}
