//! `ops::linear`: weights streamed past the tensor cores for few rows, cuBLASLt for many, or tiles in shared memory where
//! that library is missing.

use super::{images, pieces};
use pegainfer_core::cuda::Cuda;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Rows of x up to which weights are streamed. Each block reads all of x, which stays cheap while x is smaller than the
/// weights that the block streams.
const STREAM_ROWS: usize = 32;
/// Blocks that each multiprocessor should have at least, or the rows of w are dealt out in smaller portions.
const STREAM_BLOCKS: usize = 2;
/// As in csrc/linear_stream.cu, whose threads hold 16 bytes of every eighth row in each stage.
const STREAM_STAGES: usize = 8;
/// As in csrc/linear_tiled.cu.
const THREADS: usize = 256;
const STAGES: usize = 4;
const DEPTH_BYTES: usize = 64;

/// A kernel, and the rows of w and of x that one block of it takes.
struct Choice {
    kernel: &'static str,
    n_tile: usize,
    m_tile: usize,
}

/// The kernel that takes `m` rows to `n` columns on a GPU with this many multiprocessors.
fn choose(m: usize, n: usize, dtype: DType, multiprocessors: usize) -> Choice {
    let f32 = dtype == DType::F32;
    let few = !f32 && n.div_ceil(16) < STREAM_BLOCKS * multiprocessors;
    // Large tiles reuse more, if there are enough of them to fill the GPU.
    let large = m.div_ceil(128) * n.div_ceil(128) >= multiprocessors;
    let (kernel, n_tile, m_tile) = match (m, f32) {
        (0..=8, false) if few => ("stream8_bf16_8", 8, 8),
        (0..=16, false) if few => ("stream8_bf16_16", 8, 16),
        (0..=STREAM_ROWS, false) if few => ("stream8_bf16_32", 8, STREAM_ROWS),
        (0..=8, false) => ("stream16_bf16_8", 16, 8),
        (0..=16, false) => ("stream16_bf16_16", 16, 16),
        (0..=STREAM_ROWS, false) => ("stream16_bf16_32", 16, STREAM_ROWS),
        (0..=8, true) => ("stream16_f32_8", 16, 8),
        (0..=16, true) => ("stream16_f32_16", 16, 16),
        (0..=STREAM_ROWS, true) => ("stream16_f32_32", 16, STREAM_ROWS),
        (_, false) if large => ("tiled_bf16_128", 128, 128),
        (_, true) if large => ("tiled_f32_128", 128, 128),
        (_, false) => ("tiled_bf16_64", 64, 64),
        (_, true) => ("tiled_f32_64", 64, 64),
    };
    Choice { kernel, n_tile, m_tile }
}

/// Whether a product of `m` rows runs on cuBLASLt.
fn on_blaslt(gpu: &mut Cuda, m: usize) -> bool {
    m > STREAM_ROWS && gpu.has_blaslt()
}

/// Name of the kernel that [`linear`] launches, for the record.
pub(crate) fn linear_kernel(gpu: &mut Cuda, m: usize, n: usize, dtype: DType) -> &'static str {
    match on_blaslt(gpu, m) {
        true => "cublaslt",
        false => choose(m, n, dtype, gpu.multiprocessors()).kernel,
    }
}

pub(crate) fn linear(exec: &mut Exec, x: &Tensor, w: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let (m, k) = x.rows_cols();
    let n = w.rows_cols().0;
    pieces("linear", k)?;
    pieces("linear", n)?;
    let gpu = exec.gpu()?;
    if on_blaslt(gpu, m) {
        return gpu.matmul("linear", x, w, false, out);
    }
    let Choice { kernel, n_tile, m_tile } = choose(m, n, out.dtype(), gpu.multiprocessors());
    let streamed = m <= STREAM_ROWS;
    let image = if streamed { &images::LINEAR_STREAM } else { &images::LINEAR_TILED };
    let launch = gpu.launch("linear", image, kernel)?.input(x).input(w).output(out).u32(m).u32(n).u32(k);
    let (grid, shared) = match streamed {
        true => ([n.div_ceil(n_tile), 1, 1], STREAM_STAGES * n_tile / 8 * THREADS * 16),
        false => ([m.div_ceil(m_tile), n.div_ceil(n_tile), 1], STAGES * (m_tile + n_tile) * DEPTH_BYTES),
    };
    // SAFETY: matches csrc/linear_stream.cu and csrc/linear_tiled.cu; the op checked the shapes.
    unsafe { launch.shared(shared).run(grid, THREADS) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_the_rows_and_small_matrices_still_fill_the_gpu() {
        for m in 1..=300 {
            for n in [8, 2560, 6144, 151_936] {
                for dtype in [DType::Bf16, DType::F32] {
                    let choice = choose(m, n, dtype, 132);
                    assert!(m > STREAM_ROWS || choice.m_tile >= m, "{} for {m} rows", choice.kernel);
                }
            }
        }
        assert_eq!(choose(1, 2560, DType::Bf16, 132).n_tile, 8);
        assert_eq!(choose(1, 6144, DType::Bf16, 132).n_tile, 16);
        assert_eq!(choose(64, 2560, DType::Bf16, 132).n_tile, 64);
        assert_eq!(choose(4096, 2560, DType::Bf16, 132).n_tile, 128);
    }
}
