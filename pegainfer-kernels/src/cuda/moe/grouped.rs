//! The grouped GEMMs of a mixture of experts (csrc/moe/{mma,wgmma}.cu).

use super::operands::{Down, GateUp, OP, Tiles, Weight};
use super::wgmma;
use crate::cuda::abi::{Entry, MoeDownMma, MoeGateUpMma};
use crate::limits::moe_mma;
use pegainfer_core::cuda::Cuda;
use pegainfer_core::tensor::OpError;

/// Entries by format (bf16, FP8) and tile.
const GATE_UP_MMA: [[Entry<MoeGateUpMma<'static>>; 3]; 2] = [
    [
        MoeGateUpMma::moe_gate_up_mma_bf16_16,
        MoeGateUpMma::moe_gate_up_mma_bf16_32,
        MoeGateUpMma::moe_gate_up_mma_bf16_64,
    ],
    [MoeGateUpMma::moe_gate_up_mma_fp8_16, MoeGateUpMma::moe_gate_up_mma_fp8_32, MoeGateUpMma::moe_gate_up_mma_fp8_64],
];
const DOWN_MMA: [[Entry<MoeDownMma<'static>>; 3]; 2] = [
    [MoeDownMma::moe_down_mma_bf16_16, MoeDownMma::moe_down_mma_bf16_32, MoeDownMma::moe_down_mma_bf16_64],
    [MoeDownMma::moe_down_mma_fp8_16, MoeDownMma::moe_down_mma_fp8_32, MoeDownMma::moe_down_mma_fp8_64],
];

/// Bytes of shared memory of a block of a GEMM by mma.sync.
fn mma_shared(w: Weight<'_>, tile: usize) -> usize {
    let weights = moe_mma::ROWS * moe_mma::DEPTH * w.codes.dtype().size();
    moe_mma::STAGES * (weights + tile * (2 * moe_mma::DEPTH + 64))
}

/// Index of the entry for a tile of 16, 32 or 64 pairs.
fn tile_index(tile: usize) -> usize {
    (tile / 16).ilog2() as usize
}

/// Launches `gate_up`: by wgmma, or by mma.sync in tiles of at most `tile` pairs.
pub(super) fn gate_up(
    gpu: &mut Cuda,
    tile: Option<usize>,
    w: Weight<'_>,
    list: Tiles,
    operands: GateUp<'_>,
) -> Result<(), OpError> {
    let Some(tile) = tile else { return wgmma::gate_up(gpu, w, list, operands) };
    let (Tiles { tiles, pairs, most, .. }, scales) = (list, w.scales_address());
    let GateUp { x, weights, h, experts_of_token, width, k, .. } = operands;
    let arguments = MoeGateUpMma { x, w: w.codes, scales, tiles, pairs, weights, h, experts_of_token, width, k };
    let launch = GATE_UP_MMA[w.format()][tile_index(tile)].launch(gpu, OP, arguments)?;
    let grid = [width.div_ceil(moe_mma::ROWS / 2), most, 1];
    // SAFETY: the op checked the shapes; the grid covers all columns of `h` of every tile.
    unsafe { launch.overlapped().shared(mma_shared(w, tile)).run(grid, moe_mma::THREADS) }
}

/// Launches `down`, after `gate_up` of the same tiles.
pub(super) fn down(
    gpu: &mut Cuda,
    tile: Option<usize>,
    w: Weight<'_>,
    list: Tiles,
    operands: Down,
) -> Result<(), OpError> {
    let Some(tile) = tile else { return wgmma::down(gpu, w, list, operands) };
    let (Tiles { tiles, pairs, most, .. }, scales) = (list, w.scales_address());
    let Down { h, y, hidden, from, columns, k } = operands;
    let arguments = MoeDownMma { h, w: w.codes, scales, tiles, pairs, y, hidden, from, columns, k };
    let launch = DOWN_MMA[w.format()][tile_index(tile)].launch(gpu, OP, arguments)?;
    let grid = [columns.div_ceil(moe_mma::ROWS), most, 1];
    // SAFETY: the op checked the shapes; the grid covers all columns of `y` of every tile.
    unsafe { launch.overlapped().shared(mma_shared(w, tile)).run(grid, moe_mma::THREADS) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tile_has_an_entry() {
        assert_eq!([16, 32, 64].map(tile_index), [0, 1, 2]);
    }
}
