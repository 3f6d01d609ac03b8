//! FP8 weights on a GPU: how they are made (csrc/gemm/fp8.cu), and GEMMs of many rows with them.

use super::abi::{QuantizeActivations, QuantizeWeights};
use super::blaslt::{self, FREE_BYTES, GemmSize, Multiplied, Operands};
use super::columns::Columns;
use super::vectors;
use super::widened::{Narrow, widened};
use crate::limits::fp8::{ACTIVATION_BLOCKS, ACTIVATION_THREADS, BLOCK, ROW_ALIGNMENT, WEIGHT_THREADS};
use pegainfer_core::cuda::Cuda;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Number of rows up to which a warp rounds few blocks of columns, so that a launch ends soon.
const FEW_ROWS: usize = 256;
/// Blocks of columns that a warp rounds then.
const FEW_ACTIVATION_BLOCKS: usize = 2;
const _: () = assert!(ACTIVATION_BLOCKS == 8, "the kernel of many rows");

/// `ops::quantize_fp8`.
pub(crate) fn quantize_fp8(
    exec: &mut Exec,
    w: &Tensor,
    codes: &mut Tensor,
    scales: &mut Tensor,
) -> Result<(), OpError> {
    let (op, (n, k)) = ("quantize_fp8", w.rows_cols());
    vectors(op, k)?;
    let launch =
        QuantizeWeights::quantize_weights.launch(exec.gpu()?, op, QuantizeWeights { w, codes, scales, n, k })?;
    // SAFETY: the op checked the shapes; the grid covers all blocks.
    unsafe { launch.run([k.div_ceil(BLOCK), n.div_ceil(BLOCK), 1], WEIGHT_THREADS) }
}

/// Rows that the codes of an activation have memory for, as used by csrc/common/activation.cuh; 0 in bf16.
pub(super) fn padded_rows(x: &Tensor) -> usize {
    if x.dtype() == DType::E4m3 { x.rows_cols().0.next_multiple_of(ROW_ALIGNMENT) } else { 0 }
}

/// Activations in FP8.
pub(super) struct Rounded {
    /// Address of `[rows, k]` codes.
    pub codes: u64,
    /// Address of `[k / 128, rows]` f32 scales.
    pub scales: u64,
    /// Rows of the activations, with zeros up to a multiple of [`ROW_ALIGNMENT`].
    pub rows: usize,
}

impl Rounded {
    /// An activation that its producer has rounded.
    pub fn of(x: &Tensor) -> Self {
        let (rows, codes) = (padded_rows(x), x.device());
        Self { codes, scales: codes + (rows * x.rows_cols().1) as u64, rows }
    }
}

/// Rounds `rows` rows of `x`, from `first` on, to FP8 at address `to`, which must have enough memory.
pub(super) fn round_activations(
    gpu: &mut Cuda,
    op: &'static str,
    x: &Tensor,
    (first, rows): (usize, usize),
    to: u64,
) -> Result<Rounded, OpError> {
    let (k, padded) = (x.rows_cols().1, rows.next_multiple_of(ROW_ALIGNMENT));
    let (codes, scales) = (to, to + (padded * k) as u64);
    let arguments = QuantizeActivations { x, codes, scales, first, m: rows, padded, k };
    let (kernel, blocks) = match rows > FEW_ROWS {
        true => (QuantizeActivations::quantize_activations_8, ACTIVATION_BLOCKS),
        false => (QuantizeActivations::quantize_activations_2, FEW_ACTIVATION_BLOCKS),
    };
    let launch = kernel.launch(gpu, op, arguments)?.overlapped();
    let grid = [padded.div_ceil(ACTIVATION_THREADS / 32), (k / BLOCK).div_ceil(blocks), 1];
    // SAFETY: the choice checked that k is in whole blocks; there is space for the padded rows.
    unsafe { launch.run(grid, ACTIVATION_THREADS)? };
    Ok(Rounded { codes, scales, rows: padded })
}

/// `out = x · wᵀ`, FP8 by FP8: activations are rounded in the workspace, as many rows at a time as fit. Up to three
/// rows after those of `out` are overwritten; if it has no memory for them, the weights are widened instead.
pub(super) fn fp8_by_fp8(
    exec: &mut Exec,
    op: &'static str,
    x: &Tensor,
    (codes, scales): (&Tensor, &Tensor),
    out: &mut Columns<'_>,
) -> Result<(), OpError> {
    let (m, k) = x.rows_cols();
    if x.dtype() == DType::E4m3 {
        return fp8_gemm(exec, op, &Rounded::of(x), (k, codes, scales), 0, out);
    }
    if m.next_multiple_of(ROW_ALIGNMENT) > out.tensor.max_rows() {
        return widened(exec, op, x, Narrow::Fp8(codes, scales), out);
    }
    let workspace = exec.gpu()?.workspace();
    let row_bytes = k + k / BLOCK * size_of::<f32>();
    // Whole tiles of the library.
    let most = (FREE_BYTES / row_bytes / BLOCK * BLOCK).max(1);
    for first in (0..m).step_by(most) {
        let rows = most.min(m - first);
        let rounded = round_activations(exec.gpu()?, op, x, (first, rows), workspace)?;
        fp8_gemm(exec, op, &rounded, (k, codes, scales), first, out)?;
    }
    Ok(())
}

/// The GEMM of rounded activations, into the rows of `out` from `first` on.
fn fp8_gemm(
    exec: &mut Exec,
    op: &'static str,
    x: &Rounded,
    (k, codes, scales): (usize, &Tensor, &Tensor),
    first: usize,
    out: &mut Columns<'_>,
) -> Result<(), OpError> {
    let (out_type, pitch, n) = (out.tensor.dtype(), out.pitch(), codes.rows_cols().0);
    let size = GemmSize { pitch, ..GemmSize::whole((x.rows, n, k), out_type, Multiplied::Fp8) };
    let scales = (x.scales, scales.device());
    let at = Operands { x: x.codes, w: codes.device(), out: out.address(first), scales };
    blaslt::launch(exec, op, size, at, false, out.tensor)
}
