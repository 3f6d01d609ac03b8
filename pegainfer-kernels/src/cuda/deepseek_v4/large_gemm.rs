//! Dense GEMMs with many tokens, on cuBLASLt (csrc/deepseek_v4/pack.cu packs and widens its operands).

use crate::choice::{self, DenseGemm, DenseShape, WeightFormat};
use crate::cuda::abi::{PackActivations, Target, WidenE8m0};
use crate::cuda::blaslt::{self, FREE_BYTES, GemmSize, Multiplied, Operands};
use crate::cuda::scratch::Scratch;
use crate::limits::deepseek_v4_pack::THREADS;
use crate::limits::fp8::{BLOCK, ROW_ALIGNMENT};
use crate::ops::Matrix;
use pegainfer_core::cuda::Cuda;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::ops::Range;

/// Elements of a vector of 16 bytes: of bf16, and of codes.
pub(super) const VECTOR: usize = 8;
const CODES: usize = 16;

/// The kernel for `out = x wᵀ`, or for `groups` such GEMMs, with many tokens; `None` if a kernel for few tokens or
/// other formats runs. `rounded`: if w is FP8, x are values of `round_activation`. Does not wait for cuBLASLt with few
/// tokens.
pub(crate) fn choose_large(
    exec: &mut Exec,
    x: &Tensor,
    rounded: bool,
    (w, groups): (&Matrix, usize),
    out: &Tensor,
) -> Result<Option<DenseGemm>, OpError> {
    let (m, (n, k)) = (x.rows_cols().0, w.shape());
    let format = match w {
        Matrix::Bf16(_) => WeightFormat::Bf16,
        Matrix::Fp8 { .. } => WeightFormat::Fp8,
        Matrix::Fp4 { .. } | Matrix::Grouped { .. } | Matrix::Stacked(_) => return Ok(None),
    };
    if m < DenseGemm::MIN_TOKENS || x.dtype() != DType::Bf16 || groups > 1 && max_widened(n / groups, k) == 0 {
        return Ok(None);
    }
    let shape = DenseShape { m, n: n / groups, k, groups, out_rows: out.max_rows(), format, rounded };
    Ok(choice::gpu(exec)?.and_then(|gpu| DenseGemm::choose(&gpu, shape)))
}

/// The kernel for `matmul_rounding` with many tokens, which packs x and thereby rounds it; `None` as in
/// [`choose_large`].
pub(crate) fn rounds_many(exec: &mut Exec, x: &Tensor, w: &Matrix, out: &Tensor) -> Result<Option<DenseGemm>, OpError> {
    Ok(choose_large(exec, x, true, (w, 1), out)?.filter(|kernel| matches!(kernel, DenseGemm::Fp8CublasLt)))
}

/// `matmul`, `matmul_rounding` and `grouped_matmul` by the kernel that was chosen for them.
pub(super) fn large_gemm(
    exec: &mut Exec,
    op: &'static str,
    kernel: DenseGemm,
    x: &Tensor,
    (w, groups): (&Matrix, usize),
    out: &mut Tensor,
) -> Result<(), OpError> {
    match kernel {
        DenseGemm::Fp8CublasLt => fp8_by_fp8(exec, op, x, w, out),
        DenseGemm::Widened => widened(exec, op, x, (w, groups), out),
        DenseGemm::CublasLt => {
            let size = groups_of(x, w, groups).size(groups, out, Multiplied::Widened);
            let at = Operands { x: x.device(), w: w.device().0.device(), out: out.device(), scales: (0, 0) };
            blaslt::launch(exec, op, size, at, false, out)
        }
    }
}

/// Shape of the GEMMs of groups.
struct Groups {
    /// Tokens.
    m: usize,
    /// Rows and columns of a group's weight.
    n: usize,
    k: usize,
    /// Elements from one row of x to the next.
    x_pitch: usize,
}

/// The shape of `groups` GEMMs of columns of x with groups of rows of w.
fn groups_of(x: &Tensor, w: &Matrix, groups: usize) -> Groups {
    let ((m, x_pitch), (n, k)) = (x.rows_cols(), w.shape());
    Groups { m, n: n / groups, k, x_pitch }
}

impl Groups {
    /// The size of a call of the library that runs `groups` of the GEMMs.
    fn size(&self, groups: usize, out: &Tensor, multiplied: Multiplied) -> GemmSize {
        let Self { m, n, k, x_pitch } = *self;
        let pitch = out.rows_cols().1;
        GemmSize { pitch, x_pitch, groups, ..GemmSize::whole((m, n, k), out.dtype(), multiplied) }
    }
}

/// Activations in FP8 in the workspace, and the f32 scales of the weights that they are multiplied with.
pub(super) struct Packed {
    /// Address of `[rows, k]` codes.
    pub codes: u64,
    /// Address of `[k / 128, rows]` f32 scales.
    pub scales: u64,
    /// Address of `[2, each]` f32 scales of weights.
    pub weight_scales: u64,
    /// A multiple of [`ROW_ALIGNMENT`].
    pub rows: usize,
}

/// Bytes of a packed row of k columns: codes, and f32 scales. Unlike in `pack_rows`, rows are not padded, and the
/// scales are separate.
pub(super) fn packed_bytes(k: usize) -> usize {
    k + k / BLOCK * size_of::<f32>()
}

/// Codes of a matrix in FP8, and the address and number of its scales.
pub(super) fn fp8<'w>(op: &'static str, w: &'w Matrix) -> Result<(&'w Tensor, u64, usize), OpError> {
    match w {
        Matrix::Fp8 { weight, scale } => Ok((weight, scale.tensor().device(), scale.tensor().elements())),
        _ => Err(OpError { op, message: "a kernel for FP8 weights was chosen for others; report it".to_owned() }),
    }
}

/// Packs `rows` rows of x, of k columns, and the scales of one or two weights of the same shape (0: none).
pub(super) fn pack(
    exec: &mut Exec,
    op: &'static str,
    x: &Tensor,
    rows: Range<usize>,
    (scales, each): ([u64; 2], usize),
    scratch: &mut Scratch,
) -> Result<Packed, OpError> {
    let (k, padded) = (x.rows_cols().1, rows.len().next_multiple_of(ROW_ALIGNMENT));
    let packed = Packed {
        codes: scratch.take(op, padded * k)?,
        scales: scratch.take(op, padded * k / BLOCK * size_of::<f32>())?,
        weight_scales: scratch.take(op, 2 * each * size_of::<f32>())?,
        rows: padded,
    };
    let arguments = PackActivations {
        x: x.device() + (rows.start * k * DType::Bf16.size()) as u64,
        codes: Target::Scratch(packed.codes),
        scales: packed.scales,
        first: scales[0],
        second: scales[1],
        weight_scales: packed.weight_scales,
        each,
        m: rows.len(),
        padded,
        k,
    };
    let launch = PackActivations::pack_activations.launch(exec.gpu()?, op, arguments)?.overlapped();
    // SAFETY: k is in whole groups, all covered by the grid; there is space for the padded rows.
    unsafe { launch.run([(padded * k / VECTOR).div_ceil(THREADS), 1, 1], THREADS)? };
    Ok(packed)
}

/// Rows of each pass over `m` rows of `bytes` bytes, which fit the free half of the workspace. Passes are about equal,
/// and whole tiles of the library.
pub(super) fn pass(m: usize, bytes: usize) -> usize {
    let max = ((FREE_BYTES - (1 << 20)) / bytes.max(1)).max(BLOCK);
    m.div_ceil(m.div_ceil(max).max(1)).next_multiple_of(BLOCK).min(max / BLOCK * BLOCK)
}

/// [`DenseGemm::Fp8CublasLt`]. Up to three rows after those of `out` are overwritten.
fn fp8_by_fp8(exec: &mut Exec, op: &'static str, x: &Tensor, w: &Matrix, out: &mut Tensor) -> Result<(), OpError> {
    let ((m, k), n) = (x.rows_cols(), w.shape().0);
    let (codes, scales, each) = fp8(op, w)?;
    let rows = pass(m, packed_bytes(k));
    for first in (0..m).step_by(rows) {
        let mut scratch = Scratch::new(exec)?;
        let packed = pack(exec, op, x, first..(first + rows).min(m), ([scales, 0], each), &mut scratch)?;
        let size = GemmSize::whole((packed.rows, n, k), out.dtype(), Multiplied::Fp8);
        let address = out.device() + (first * n * out.dtype().size()) as u64;
        let scales = (packed.scales, packed.weight_scales);
        let at = Operands { x: packed.codes, w: codes.device(), out: address, scales };
        blaslt::launch(exec, op, size, at, false, out)?;
    }
    Ok(())
}

/// Maximum number of rows of k columns in bf16 that fit the free half of the workspace, in multiples of `each`.
fn max_widened(each: usize, k: usize) -> usize {
    FREE_BYTES / (k * DType::Bf16.size()) / each.max(1) * each
}

/// [`DenseGemm::Widened`]: widens the weights of as many groups, or rows of a single weight, at a time as fit the
/// workspace.
fn widened(
    exec: &mut Exec,
    op: &'static str,
    x: &Tensor,
    (w, groups): (&Matrix, usize),
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (shape, all) = (groups_of(x, w, groups), w.shape().0);
    let max = max_widened(if groups > 1 { shape.n } else { BLOCK }, shape.k);
    let workspace = exec.gpu()?.workspace();
    for first in (0..all).step_by(max) {
        let rows = max.min(all - first);
        widen(exec.gpu()?, op, w, (first, rows), Target::Scratch(workspace))?;
        let (n, groups, group) = if groups > 1 { (shape.n, rows / shape.n, first / shape.n) } else { (rows, 1, 0) };
        let size = GemmSize { n, ..shape.size(groups, out, Multiplied::Widened) };
        let x = x.device() + (group * shape.k * DType::Bf16.size()) as u64;
        let address = out.device() + (first * out.dtype().size()) as u64;
        let at = Operands { x, w: workspace, out: address, scales: (0, 0) };
        blaslt::launch(exec, op, size, at, false, out)?;
    }
    Ok(())
}

/// `out = w`, of w in FP8 with scales in E8M0.
pub(crate) fn widen_all(exec: &mut Exec, op: &'static str, w: &Matrix, out: &mut Tensor) -> Result<(), OpError> {
    widen(exec.gpu()?, op, w, (0, w.shape().0), Target::Tensor(out))
}

/// Writes rows `first` to `first + rows - 1` of w in bf16 to the address `to`.
fn widen(
    gpu: &mut Cuda,
    op: &'static str,
    w: &Matrix,
    (first, rows): (usize, usize),
    to: Target<'_>,
) -> Result<(), OpError> {
    let ((codes, scales, _), k) = (fp8(op, w)?, w.shape().1);
    let arguments = WidenE8m0 { codes, scales, out: to, first, rows, k };
    let launch = WidenE8m0::widen_e8m0.launch(gpu, op, arguments)?.overlapped();
    let launch = w.tensors().into_iter().fold(launch, |launch, tensor| launch.early(tensor));
    // SAFETY: rows are whole vectors, all covered by the grid; the workspace has space for them.
    unsafe { launch.run([(rows * k / CODES).div_ceil(THREADS), 1, 1], THREADS) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_are_balanced_whole_tiles_that_fit() {
        for (m, k) in [(129, 4096), (4096, 4096), (4096, 8192), (16_384, 8192), (16_384, 1024), (5000, 8192)] {
            let rows = pass(m, packed_bytes(k));
            assert!(rows.is_multiple_of(BLOCK) && rows * packed_bytes(k) < FREE_BYTES, "{m} x {k}: {rows}");
            let last = m - (m - 1) / rows * rows;
            assert!(m <= rows || 2 * last >= rows - BLOCK * m.div_ceil(rows), "{m} x {k}: {rows}, then {last}");
        }
        assert_eq!(pass(4096, packed_bytes(4096)), 4096);
    }

    #[test]
    fn groups_are_widened_whole() {
        assert_eq!((max_widened(1024, 4096), max_widened(BLOCK, 1024)), (10_240, 40_960));
        assert_eq!(max_widened(16_384, 4096), 0);
    }
}
