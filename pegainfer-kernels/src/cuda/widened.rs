//! GEMMs of many rows with weights below 16 bits, which are widened to bf16 in the workspace: csrc/gemm/fp8.cu, int4.cu and
//! groups.cu.

use super::abi::{WidenGroups, WidenWeights};
use super::blaslt::{self, FREE_BYTES, GemmSize, Multiplied, Operands};
use super::columns::Columns;
use super::gemm_mma::tiled;
use super::groups::{self, PackedWeight};
use crate::choice::{self, Gemm};
use crate::limits::fp8::{BLOCK, WIDEN_THREADS};
use crate::limits::groups as limits;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_core::weights::grouped::format::{GroupFormat, GroupScales, Offset, ScaleDType, Values};

/// Elements of a vector of FP8 codes.
const VECTOR: usize = 16;

/// A weight below 16 bits: codes and scales.
#[derive(Clone, Copy)]
pub(super) enum Narrow<'a> {
    /// e4m3 with f32 scales of blocks.
    Fp8(&'a Tensor, &'a Tensor),
    /// Groups of columns.
    Grouped(GroupFormat, &'a Tensor, &'a Tensor),
}

impl Narrow<'_> {
    /// `(n, k)`.
    fn shape(self) -> (usize, usize) {
        match self {
            Self::Fp8(codes, _) => codes.rows_cols(),
            Self::Grouped(format, codes, _) => (codes.rows_cols().0, codes.rows_cols().1 * 8 / format.bits()),
        }
    }

    /// Launches the kernel that widens `rows` rows from `first` on to address `to`.
    fn widen(self, exec: &mut Exec, op: &'static str, (first, rows): (usize, usize), to: u64) -> Result<(), OpError> {
        let ((n, k), gpu) = (self.shape(), exec.gpu()?);
        match self {
            Self::Fp8(codes, scales) => {
                if !k.is_multiple_of(VECTOR) {
                    let message = format!("FP8 weights of {k} columns: a GPU takes multiples of {VECTOR}");
                    return Err(OpError { op, message });
                }
                let arguments = WidenWeights { codes, scales, out: to, first, rows, k };
                let launch = WidenWeights::widen_weights.launch(gpu, op, arguments)?;
                // SAFETY: rows are whole vectors, all covered by the grid; the caller has memory for them.
                unsafe { launch.run([(rows * k / VECTOR).div_ceil(WIDEN_THREADS), 1, 1], WIDEN_THREADS) }
            }
            Self::Grouped(format, codes, scales) => match PackedWeight::of(format, (n, k), codes, scales) {
                Some(packed) => groups::widen(gpu, op, (packed, k), (first, rows), to),
                None => {
                    let (code_pitch, scale_pitch) = (format.code_bytes(k), format.scale_bytes(k));
                    let (values, kind) = numbers(format);
                    let arguments = WidenGroups {
                        codes,
                        scales,
                        out: to,
                        values: values as usize,
                        bits: format.bits(),
                        kind: kind as usize,
                        group: format.group(),
                        k,
                        code_pitch,
                        scale_pitch,
                        first,
                        rows,
                    };
                    let launch = WidenGroups::widen_groups.launch(gpu, op, arguments)?;
                    // SAFETY: 8 columns a thread, all covered by the grid; the caller has memory for them.
                    unsafe { launch.run([(rows * k / 8).div_ceil(limits::THREADS), 1, 1], limits::THREADS) }
                }
            },
        }
    }
}

/// The numbers of a format's meaning of codes and of its layout of scales in csrc/gemm/groups.cu.
fn numbers(format: GroupFormat) -> (u32, u32) {
    let values = match format.values {
        Values::Int { .. } if format.centre() > 0 => limits::CENTRED,
        Values::Int { .. } => limits::UNSIGNED,
        Values::Iq4 => limits::IQ4,
        Values::E2m1 => limits::E2M1,
        Values::E4m3 => limits::CODE_E4M3,
    };
    let scales = match format.scales {
        GroupScales::Plain { dtype, offset, .. } => {
            let dtype = match dtype {
                ScaleDType::F16 => limits::PLAIN_F16,
                ScaleDType::Bf16 => limits::PLAIN_BF16,
                ScaleDType::F32 => limits::PLAIN_F32,
            };
            dtype
                + match offset {
                    Offset::None => 0,
                    Offset::Zero => limits::WITH_ZERO,
                    Offset::Min => limits::WITH_MIN,
                }
        }
        GroupScales::K4 => limits::K4,
        GroupScales::K6 => limits::K6,
        GroupScales::Xs => limits::XS,
        GroupScales::E4m3 => limits::E4M3,
        GroupScales::E8m0 => limits::E8M0,
    };
    (values, scales)
}

/// `out = x · wᵀ` with w widened to bf16 in the workspace, as many rows at a time as fit.
pub(super) fn widened(
    exec: &mut Exec,
    op: &'static str,
    x: &Tensor,
    w: Narrow<'_>,
    out: &mut Columns<'_>,
) -> Result<(), OpError> {
    let (m, (n, k)) = (x.rows_cols().0, w.shape());
    let (workspace, start) = (exec.gpu()?.workspace(), out.first);
    let most = (FREE_BYTES / (k * DType::Bf16.size()) / BLOCK * BLOCK).max(1);
    for first in (0..n).step_by(most) {
        let rows = most.min(n - first);
        w.widen(exec, op, (first, rows), workspace)?;
        out.first = start + first;
        let gpu = choice::gpu(exec)?;
        match gpu.map(|gpu| Gemm::large(&gpu, m, rows)) {
            Some(Gemm::TiledMma(tile)) => tiled(exec.gpu()?, op, x, (workspace, rows), tile, out)?,
            _ => {
                let (out_type, pitch) = (out.tensor.dtype(), out.pitch());
                let size = GemmSize { pitch, ..GemmSize::whole((m, rows, k), out_type, Multiplied::Widened) };
                let at = Operands { x: x.device(), w: workspace, out: out.address(0), scales: (0, 0) };
                blaslt::launch(exec, op, size, at, false, out.tensor)?;
            }
        }
    }
    out.first = start;
    Ok(())
}
