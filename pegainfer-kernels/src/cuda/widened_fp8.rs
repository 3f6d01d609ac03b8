//! GEMMs of many rows with weights of four bits, FP8 by FP8: the weights are widened to FP8 in the workspace by
//! csrc/gemm/int4.cu, exactly; activations are rounded, there or by the op before.

use super::abi::WidenInt4ToFp8;
use super::blaslt::{self, FREE_BYTES_BY_GROUP, GemmSize, Multiplied, Operands};
use super::columns::Columns;
use super::fp8::{Rounded, round_activations};
use super::groups::PackedWeight;
use super::widened::{Narrow, widened};
use crate::limits::fp8::{BLOCK, ROW_ALIGNMENT};
use crate::limits::int4::THREADS;
use pegainfer_core::cuda::Cuda;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Rows of w that a warp widens.
const WARP_ROWS: usize = 8;

/// Bytes of the workspace, from this address on.
#[derive(Clone, Copy)]
struct Space {
    address: u64,
    bytes: usize,
}

impl Space {
    /// Rows of `k` FP8 codes with their scales that fit, in whole tiles of the library.
    fn rows(self, k: usize) -> usize {
        (self.bytes / (k + k / BLOCK * size_of::<f32>()) / BLOCK * BLOCK).max(BLOCK)
    }
}

/// `out = x · wᵀ`. Up to three rows after those of `out` are overwritten; if it has no memory for them, activations stay
/// exact and the weights are widened to bf16.
pub(super) fn widened_to_fp8(
    exec: &mut Exec,
    op: &'static str,
    x: &Tensor,
    w: PackedWeight<'_>,
    out: &mut Columns<'_>,
) -> Result<(), OpError> {
    let (address, (m, k)) = (exec.gpu()?.workspace(), x.rows_cols());
    if x.dtype() == DType::E4m3 {
        return multiply(exec, op, (&Rounded::of(x), 0), w, Space { address, bytes: FREE_BYTES_BY_GROUP }, out);
    }
    if m.next_multiple_of(ROW_ALIGNMENT) > out.tensor.max_rows() {
        return widened(exec, op, x, Narrow::Grouped(w.format, w.codes, w.scales), out);
    }
    let bytes = FREE_BYTES_BY_GROUP / 2;
    let most = Space { address, bytes }.rows(k);
    for first in (0..m).step_by(most) {
        let rounded = round_activations(exec.gpu()?, op, x, (first, most.min(m - first)), address)?;
        multiply(exec, op, (&rounded, first), w, Space { address: address + bytes as u64, bytes }, out)?;
    }
    Ok(())
}

/// The GEMM of rounded activations, into the rows of `out` from `first_row` on; widens as many rows of w at a
/// time as fit in `space`.
fn multiply(
    exec: &mut Exec,
    op: &'static str,
    (x, first_row): (&Rounded, usize),
    w: PackedWeight<'_>,
    space: Space,
    out: &mut Columns<'_>,
) -> Result<(), OpError> {
    let ((n, half), start) = (w.codes.rows_cols(), out.first);
    let k = 2 * half;
    let most = space.rows(k);
    for first in (0..n).step_by(most) {
        let rows = most.min(n - first);
        let scales = widen(exec.gpu()?, op, w, (first, rows), space.address)?;
        out.first = start + first;
        let (out_type, pitch) = (out.tensor.dtype(), out.pitch());
        let size = GemmSize { pitch, ..GemmSize::whole((x.rows, rows, k), out_type, Multiplied::Fp8ByGroup) };
        let at = Operands { x: x.codes, w: space.address, out: out.address(first_row), scales: (x.scales, scales) };
        blaslt::launch(exec, op, size, at, false, out.tensor)?;
    }
    out.first = start;
    Ok(())
}

/// Widens `rows` rows of `w` from `first` on to codes at address `to`; returns the address of their scales, after them.
fn widen(
    gpu: &mut Cuda,
    op: &'static str,
    PackedWeight { layout, codes, scales, .. }: PackedWeight<'_>,
    (first, rows): (usize, usize),
    to: u64,
) -> Result<u64, OpError> {
    let (n, half) = codes.rows_cols();
    let (k, zeros, group_shift, f16) =
        (2 * half, layout.extra_at(), layout.group_shift, usize::from(layout.dtype_number() == 0));
    let out_scales = to + (rows * k) as u64;
    let arguments = WidenInt4ToFp8 { codes, scales, out: to, out_scales, zeros, group_shift, f16, n, k, first, rows };
    let launch = WidenInt4ToFp8::widen_int4_fp8.launch(gpu, op, arguments)?;
    let grid = [(k / BLOCK).div_ceil(THREADS / 32), rows / WARP_ROWS, 1];
    // SAFETY: n is a multiple of 16 and k of 128, as `Packed` requires; the grid covers both; there is space for codes
    // and scales.
    unsafe { launch.run(grid, THREADS)? };
    Ok(out_scales)
}
