//! The experts of few tokens (csrc/moe/gemv.cu).

use super::operands::{OP, Weight};
use crate::cuda::abi::{Entry, MoeDownGemv, MoeGateUpGemv};
use crate::cuda::scratch::Scratch;
use crate::limits::moe_gemv::{COLUMNS, DOWN_THREADS, ROWS, THREADS, UNITS};
use pegainfer_core::cuda::Launch;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Entries by format (bf16, FP8).
const GATE_UP: [Entry<MoeGateUpGemv<'static>>; 2] =
    [MoeGateUpGemv::moe_gate_up_gemv_bf16, MoeGateUpGemv::moe_gate_up_gemv_fp8];
const DOWN: [Entry<MoeDownGemv<'static>>; 2] = [MoeDownGemv::moe_down_gemv_bf16, MoeDownGemv::moe_down_gemv_fp8];

/// Row tiles of a block of `gate_up` with so many columns, and warps that share each.
fn warps(k: usize) -> (usize, usize) {
    let most = THREADS / 32;
    let splits = k.div_ceil(COLUMNS).div_ceil(UNITS).clamp(1, most);
    (most / splits, splits)
}

/// The op with experts in one part: two launches.
pub(super) fn run(
    exec: &mut Exec,
    x: &Tensor,
    (chosen, weights): (&Tensor, &Tensor),
    (gate_up, down): (Weight<'_>, Weight<'_>),
    out: &mut Tensor,
) -> Result<(), OpError> {
    let ((tokens, hidden), experts_of_token, width) = (x.rows_cols(), chosen.rows_cols().1, down.codes.rows_cols().1);
    let h = Scratch::new(exec)?.take(OP, tokens * experts_of_token * width * DType::Bf16.size())?;
    let gpu = exec.gpu()?;
    let (row_tiles, splits) = warps(hidden);
    let (w, scales, k) = (gate_up.codes, gate_up.scales_address(), hidden);
    let arguments = MoeGateUpGemv { x, w, scales, chosen, weights, h, experts_of_token, width, k, splits };
    // The next kernel may read `chosen` before it waits.
    let launch = GATE_UP[gate_up.format()].launch(gpu, OP, arguments)?.overlapped_late_release();
    let grid = [width.div_ceil(row_tiles * ROWS / 2), tokens * experts_of_token, 1];
    // SAFETY: the op checked the shapes; the grid covers all columns of `h` of every pair.
    unsafe { launch.run(grid, 32 * row_tiles * splits)? };
    let (w, scales, k) = (down.codes, down.scales_address(), width);
    let arguments = MoeDownGemv { h, w, scales, chosen, out, experts_of_token, hidden, k };
    let launch = DOWN[down.format()].launch(gpu, OP, arguments)?.early(w).early(chosen).overlapped();
    let launch = down.scales.into_iter().fold(launch, Launch::early);
    let threads = 32 * experts_of_token.min(DOWN_THREADS / 32);
    // SAFETY: the op checked the shapes; the grid covers all columns of every token.
    unsafe { launch.run([hidden.div_ceil(ROWS), tokens, 1], threads) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_warps_of_a_block_have_whole_shares() {
        // Columns, row tiles of a block, warps of each.
        let shares = [(128, (8, 1)), (512, (4, 2)), (768, (2, 3)), (1024, (2, 4)), (2048, (1, 8)), (8192, (1, 8))];
        for (k, expected) in shares {
            assert_eq!(warps(k), expected, "{k} columns");
        }
    }
}
