//! The shared expert with many tokens: FP8 GEMMs on cuBLASLt, and the kernels between them (csrc/deepseek_v4/pack.cu).

use super::large_gemm::{Packed, VECTOR, fp8, pack, packed_bytes, pass};
use crate::choice::{self, DenseGemm, DenseShape, WeightFormat};
use crate::cuda::abi::{PackSwiglu, Target};
use crate::cuda::blaslt::{self, GemmSize, Multiplied, Operands};
use crate::cuda::scratch::Scratch;
use crate::limits::deepseek_v4_pack::THREADS;
use crate::limits::fp8::BLOCK;
use crate::ops::Matrix;
use crate::ops::deepseek_v4::{ExpertMath, Experts};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// True if [`large_expert`] takes these operands: bf16 activations, all matrices in FP8, and the input of the last one
/// rounded. Does not wait for cuBLASLt with few tokens.
pub(crate) fn is_large_expert(
    exec: &mut Exec,
    x: &Tensor,
    experts: &Experts,
    math: ExpertMath,
    out: &Tensor,
) -> Result<bool, OpError> {
    let ((m, hidden), width) = (x.rows_cols(), experts.width());
    let all_fp8 = [&experts.gate, &experts.up, &experts.down].iter().all(|w| matches!(w, Matrix::Fp8 { .. }));
    // A row of out holds gate and up values.
    let fits = 2 * width <= hidden && hidden.is_multiple_of(VECTOR);
    if m < DenseGemm::MIN_TOKENS || x.dtype() != DType::Bf16 || !all_fp8 || !math.quantize || !fits {
        return Ok(false);
    }
    let first = DenseShape {
        m,
        n: width,
        k: hidden,
        groups: 1,
        out_rows: out.max_rows(),
        format: WeightFormat::Fp8,
        rounded: true,
    };
    let last = DenseShape { n: hidden, k: width, ..first };
    Ok(choice::gpu(exec)?.is_some_and(|gpu| [first, last].iter().all(|shape| DenseGemm::is_fp8(&gpu, *shape))))
}

/// `shared_expert` on checked operands that [`is_large_expert`] accepts. If the codes of `up` follow those of `gate` in
/// memory, one GEMM gives the values of both, which are kept in the rows of `out` until the last GEMM overwrites them.
/// Up to three rows after those of `out` are overwritten.
pub(super) fn large_expert(
    exec: &mut Exec,
    op: &'static str,
    x: &Tensor,
    (experts, math): (&Experts, ExpertMath),
    out: &mut Tensor,
) -> Result<(), OpError> {
    let ((m, hidden), width) = (x.rows_cols(), experts.width());
    let (gate, up, down) = (fp8(op, &experts.gate)?, fp8(op, &experts.up)?, fp8(op, &experts.down)?);
    let rows = pass(m, packed_bytes(hidden) + packed_bytes(width));
    for first in (0..m).step_by(rows) {
        let count = rows.min(m - first);
        let mut scratch = Scratch::new(exec)?;
        let packed = pack(exec, op, x, first..first + count, ([gate.1, up.1], gate.2), &mut scratch)?;
        let row = out.device() + (first * hidden * DType::Bf16.size()) as u64;
        let up_row = row + (width * DType::Bf16.size()) as u64;
        let up_scales = packed.weight_scales + (gate.2 * size_of::<f32>()) as u64;
        let together = up.0.device() == gate.0.device() + gate.0.bytes();
        let n = if together { 2 * width } else { width };
        let inner =
            GemmSize { pitch: hidden, ..GemmSize::whole((packed.rows, n, hidden), DType::Bf16, Multiplied::Fp8) };
        let halves = [(gate.0, packed.weight_scales, row), (up.0, up_scales, up_row)];
        for (w, weight_scales, out_at) in halves.into_iter().take(if together { 1 } else { 2 }) {
            let scales = (packed.scales, weight_scales);
            let at = Operands { x: packed.codes, w: w.device(), out: out_at, scales };
            blaslt::launch(exec, op, inner, at, false, out)?;
        }
        let h = pack_swiglu(exec, op, ((row, up_row), hidden), (packed.rows, width), (down, math.limit), &mut scratch)?;
        let outer = GemmSize::whole((h.rows, hidden, width), DType::Bf16, Multiplied::Fp8);
        let at = Operands { x: h.codes, w: down.0.device(), out: row, scales: (h.scales, h.weight_scales) };
        blaslt::launch(exec, op, outer, at, false, out)?;
    }
    Ok(())
}

/// SwiGLU of `[m, width]` gate and up values at these addresses, with rows `pitch` elements apart, packed in FP8 for
/// the last GEMM.
fn pack_swiglu(
    exec: &mut Exec,
    op: &'static str,
    ((gate, up), pitch): ((u64, u64), usize),
    (m, width): (usize, usize),
    ((_, down_scales, each), limit): ((&Tensor, u64, usize), f32),
    scratch: &mut Scratch,
) -> Result<Packed, OpError> {
    let h = Packed {
        codes: scratch.take(op, m * width)?,
        scales: scratch.take(op, m * width / BLOCK * size_of::<f32>())?,
        weight_scales: scratch.take(op, each * size_of::<f32>())?,
        rows: m,
    };
    let Packed { codes, scales, weight_scales, .. } = h;
    let codes = Target::Scratch(codes);
    let arguments = PackSwiglu { gate, up, codes, scales, down_scales, weight_scales, each, m, width, pitch, limit };
    let launch = PackSwiglu::pack_swiglu.launch(exec.gpu()?, op, arguments)?.overlapped();
    // SAFETY: rows are whole groups, all covered by the grid.
    unsafe { launch.run([(m * width / VECTOR).div_ceil(THREADS), 1, 1], THREADS)? };
    Ok(h)
}
