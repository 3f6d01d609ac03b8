//! `ops::linear`: weights streamed past the tensor cores for few rows, tiles in shared memory for many.

use super::{images, pieces};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Rows of x up to which weights are streamed. Each block reads all of x, which stays cheap while x is smaller than the
/// weights that the block streams.
const STREAM_ROWS: usize = 32;
/// Rows of w of one block of csrc/linear_stream.cu.
const STREAM_COLS: usize = 16;
/// As in csrc/linear_tiled.cu.
const THREADS: usize = 256;
const STAGES: usize = 4;
const DEPTH_BYTES: usize = 64;

/// The kernel that takes `m` rows to `n` columns on a GPU with this many multiprocessors.
pub(crate) fn linear_kernel(m: usize, n: usize, dtype: DType, multiprocessors: usize) -> &'static str {
    let f32 = dtype == DType::F32;
    match m {
        0..=8 => ["stream_bf16_8", "stream_f32_8"][usize::from(f32)],
        9..=16 => ["stream_bf16_16", "stream_f32_16"][usize::from(f32)],
        17..=STREAM_ROWS => ["stream_bf16_32", "stream_f32_32"][usize::from(f32)],
        // Large tiles reuse more, if there are enough of them to fill the GPU.
        _ if m.div_ceil(128) * n.div_ceil(128) >= multiprocessors => {
            ["tiled_bf16_128", "tiled_f32_128"][usize::from(f32)]
        }
        _ => ["tiled_bf16_64", "tiled_f32_64"][usize::from(f32)],
    }
}

pub(crate) fn linear(exec: &mut Exec, x: &Tensor, w: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let (m, k) = x.rows_cols();
    let n = w.rows_cols().0;
    pieces("linear", k)?;
    pieces("linear", n)?;
    let gpu = exec.gpu()?;
    let kernel = linear_kernel(m, n, out.dtype(), gpu.multiprocessors());
    let streamed = m <= STREAM_ROWS;
    let image = if streamed { &images::LINEAR_STREAM } else { &images::LINEAR_TILED };
    let launch = gpu.launch("linear", image, kernel)?.input(x).input(w).output(out).u32(m).u32(n).u32(k);
    if streamed {
        // SAFETY: matches csrc/linear_stream.cu; the op checked the shapes.
        return unsafe { launch.run([n.div_ceil(STREAM_COLS), 1, 1], THREADS) };
    }
    let tile = if kernel.ends_with("128") { 128 } else { 64 };
    let grid = [m.div_ceil(tile), n.div_ceil(tile), 1];
    // SAFETY: matches csrc/linear_tiled.cu; the op checked the shapes.
    unsafe { launch.shared(STAGES * 2 * tile * DEPTH_BYTES).run(grid, THREADS) }
}
