//! `matmul` and `grouped_matmul` (csrc/deepseek_v4/gemm.cu).

use super::activations::{Parts, TILES, Values, format, operand, shared_bytes, tile};
use super::large_gemm::large_gemm;
use super::skinny::skinny_gemm;
use crate::choice::DenseGemm;
use crate::cuda::abi::{Dsv4Gemm, Entry};
use crate::cuda::scratch::Scratch;
use crate::limits::deepseek_v4_gemm::{DEPTH, MAX_SEGMENTS, ROWS, THREADS};
use crate::ops::Matrix;
use crate::ops::deepseek_v4::Activation;
use pegainfer_core::cuda::COUNTERS;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Number of blocks that fill a GPU, for splitting small weights along k: a constant, so that every GPU adds in the
/// same order.
const FULL: usize = 264;
const _: () = assert!(FULL <= COUNTERS, "a GEMM that is split has fewer tiles than there are counters");
/// Bytes of the workspace for activations; the rest is for partial sums.
const ACTIVATION_BYTES: usize = 32 << 20;

/// Entries by format and tile.
const ENTRIES: [[Entry<Dsv4Gemm<'static>>; 4]; 3] = [
    [Dsv4Gemm::dsv4_gemm_bf16_8, Dsv4Gemm::dsv4_gemm_bf16_16, Dsv4Gemm::dsv4_gemm_bf16_32, Dsv4Gemm::dsv4_gemm_bf16_64],
    [Dsv4Gemm::dsv4_gemm_fp8_8, Dsv4Gemm::dsv4_gemm_fp8_16, Dsv4Gemm::dsv4_gemm_fp8_32, Dsv4Gemm::dsv4_gemm_fp8_64],
    [Dsv4Gemm::dsv4_gemm_fp4_8, Dsv4Gemm::dsv4_gemm_fp4_16, Dsv4Gemm::dsv4_gemm_fp4_32, Dsv4Gemm::dsv4_gemm_fp4_64],
];

/// Number of segments of k with separate sums, and steps of each. Depends only on the weight's shape, so that a row's
/// bits do not depend on its batch.
fn segments(n: usize, k: usize) -> (usize, usize) {
    let steps = k.div_ceil(DEPTH);
    let wanted = FULL.div_ceil(n.div_ceil(ROWS)).min(MAX_SEGMENTS).min(steps.div_ceil(2));
    let each = steps.div_ceil(wanted.max(1));
    (steps.div_ceil(each), each)
}

/// `out = x wᵀ`; the reference rounds `x` if `w` is in FP8 or FP4. `large`: the kernel chosen for many tokens; `None`
/// for few tokens.
pub(crate) fn matmul(
    exec: &mut Exec,
    op: &'static str,
    large: Option<DenseGemm>,
    x: Activation<'_>,
    w: &Matrix,
    out: &mut Tensor,
) -> Result<(), OpError> {
    match large.is_none() && skinny_gemm(exec, op, x, (w, 1), true, out)? {
        true => Ok(()),
        false => tiled_matmul(exec, op, large, x.values, (w, 1), out),
    }
}

/// [`matmul`] of `groups` groups of rows of `w`, each with its part of the columns of `x`, which is not rounded.
pub(crate) fn grouped_matmul(
    exec: &mut Exec,
    op: &'static str,
    large: Option<DenseGemm>,
    x: Activation<'_>,
    (w, groups): (&Matrix, usize),
    out: &mut Tensor,
) -> Result<(), OpError> {
    match large.is_none() && skinny_gemm(exec, op, x, (w, groups), false, out)? {
        true => Ok(()),
        false => tiled_matmul(exec, op, large, x.values, (w, groups), out),
    }
}

/// The GEMM by `large`, or otherwise by mma.sync, whose kernels take any operands.
fn tiled_matmul(
    exec: &mut Exec,
    op: &'static str,
    large: Option<DenseGemm>,
    x: &Tensor,
    (w, groups): (&Matrix, usize),
    out: &mut Tensor,
) -> Result<(), OpError> {
    if let Some(kernel) = large {
        return large_gemm(exec, op, kernel, x, (w, groups), out);
    }
    let ((m, stride), n) = (x.rows_cols(), w.shape().0);
    if groups > 1 && !(n / groups).is_multiple_of(ROWS) {
        let message = format!("groups of {} rows: the GPU kernel takes multiples of {ROWS}", n / groups);
        return Err(OpError { op, message });
    }
    let parts = Parts::of(x.dtype());
    let rows = ACTIVATION_BYTES.checked_div(stride * parts.bytes()).unwrap_or(m).clamp(1, m.max(1));
    for first in (0..m).step_by(rows) {
        multiply(exec, op, x, (w, groups), first..(first + rows).min(m), out)?;
    }
    Ok(())
}

/// Some rows of `x`.
fn multiply(
    exec: &mut Exec,
    op: &'static str,
    x: &Tensor,
    (w, groups): (&Matrix, usize),
    rows: std::ops::Range<usize>,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (stride, (n, k), m) = (x.rows_cols().1, w.shape(), rows.len());
    let mut scratch = Scratch::new(exec)?;
    let at = |tensor: &Tensor, width: usize| tensor.device() + (rows.start * width * tensor.dtype().size()) as u64;
    let values = Values { address: at(x, stride), dtype: x.dtype() };
    let x = operand(exec, op, values, m * stride, &mut scratch)?;
    let (codes, scales) = w.device();
    let (tile, (segments, steps)) = (tile(m), segments(n, k));
    let split = segments > 1 && m <= TILES[tile];
    let partials = if split { scratch.take(op, segments * m * n * 4)? } else { 0 };
    let arguments = Dsv4Gemm {
        x: x.address,
        w: codes,
        scales,
        out: at(out, n),
        partials,
        counters: exec.gpu()?.counters(),
        m,
        n,
        k,
        stride,
        group_rows: n / groups,
        planes: x.planes,
        plane: x.plane,
        segments,
        steps,
        to_f32: usize::from(out.dtype() == DType::F32),
    };
    let launch = ENTRIES[format(w)][tile].launch(exec.gpu()?, op, arguments)?;
    let launch = launch.writes(out).shared(shared_bytes(w, tile));
    let grid = [n.div_ceil(ROWS), m.div_ceil(TILES[tile]), if split { segments } else { 1 }];
    // SAFETY: the op checked the shapes; the grid covers `out` and, if it is split, the partial sums.
    unsafe { launch.run(grid, THREADS) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_cover_k_once_and_fill_the_gpu() {
        for (n, k) in [(512, 4096), (1024, 4096), (4096, 8192), (129_280, 4096), (64, 128), (256, 1024), (24, 96)] {
            let (count, each) = segments(n, k);
            assert!(count * each * DEPTH >= k && (count - 1) * each * DEPTH < k, "{n} x {k}: {count} of {each} steps");
            assert!(count == 1 || count * n.div_ceil(ROWS) <= 2 * FULL, "{n} x {k}: {count} segments");
        }
        assert_eq!((segments(512, 4096), segments(129_280, 4096)), ((16, 2), (1, 32)));
    }
}
