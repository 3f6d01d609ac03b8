//! The grouped GEMMs of many rows on Hopper (csrc/moe/wgmma.cu).

use super::operands::{Down, GateUp, OP, Tiles, Weight};
use crate::cuda::abi::{Map, MoeDownWgmma, MoeDownWgmmaFp8, MoeGateUpWgmma, MoeGateUpWgmmaFp8};
use crate::cuda::fp8::Rounded;
use crate::limits::moe_wgmma::{ROWS, SHARED_BYTES, THREADS};
use pegainfer_core::cuda::{Cuda, Launch};
use pegainfer_core::tensor::OpError;

/// Rows of a box of weights.
const BOX: usize = 64;

/// Runs a launch for tiles of pairs with `rows` rows of weights each.
fn run(launch: Launch, blocks: usize, rows: usize, most: usize) -> Result<(), OpError> {
    let items = most * rows.div_ceil(ROWS);
    // SAFETY: the op checked the shapes; the blocks take all items by turns.
    unsafe { launch.shared(SHARED_BYTES).overlapped().run([blocks.min(items).max(1), 1, 1], THREADS) }
}

/// `gate_up`; with `x` rounded to FP8, `h` is rounded too: codes `[pairs, width]`, then their scales
/// `[width / 128, pairs]`.
pub(super) fn gate_up(
    gpu: &mut Cuda,
    w: Weight<'_>,
    Tiles { tiles, pairs, most, count, .. }: Tiles,
    GateUp { x, rounded, weights, h, experts_of_token, width, k }: GateUp<'_>,
) -> Result<(), OpError> {
    let blocks = gpu.multiprocessors();
    let launch = match (w.scales, rounded) {
        (Some(scales), Some(Rounded { codes, scales: x_scales, rows })) => {
            let (x, x_scales, padded, pitch, h_scales) = (*codes, *x_scales, *rows, count, h + (count * width) as u64);
            let w = Map::codes(OP, w.codes, BOX)?;
            #[rustfmt::skip]
            let arguments = MoeGateUpWgmmaFp8 {
                w, scales, x, x_scales, tiles, pairs, weights, h, h_scales, padded, pitch, experts_of_token, width, k,
            };
            MoeGateUpWgmmaFp8::moe_gate_up_wgmma_fp8.launch(gpu, OP, arguments)?
        }
        _ => {
            let w = Map::input(OP, w.codes, BOX)?;
            let arguments = MoeGateUpWgmma { w, x, tiles, pairs, weights, h, experts_of_token, width, k };
            MoeGateUpWgmma::moe_gate_up_wgmma_bf16.launch(gpu, OP, arguments)?
        }
    };
    run(launch, blocks, 2 * width, most)
}

/// `down` of an `h` that [`gate_up`] made with the same weights' format.
pub(super) fn down(
    gpu: &mut Cuda,
    w: Weight<'_>,
    Tiles { tiles, pairs, most, count, .. }: Tiles,
    Down { h, y, hidden, from, columns, k }: Down,
) -> Result<(), OpError> {
    let blocks = gpu.multiprocessors();
    let launch = match w.scales {
        Some(scales) => {
            let (pitch, h_scales) = (count, h + (count * k) as u64);
            let w = Map::codes(OP, w.codes, BOX)?;
            #[rustfmt::skip]
            let arguments = MoeDownWgmmaFp8 {
                w, scales, h, h_scales, tiles, pairs, y, pitch, hidden, from, columns, k,
            };
            MoeDownWgmmaFp8::moe_down_wgmma_fp8.launch(gpu, OP, arguments)?
        }
        None => {
            let w = Map::input(OP, w.codes, BOX)?;
            let arguments = MoeDownWgmma { w, h, tiles, pairs, y, hidden, from, columns, k };
            MoeDownWgmma::moe_down_wgmma_bf16.launch(gpu, OP, arguments)?
        }
    };
    run(launch, blocks, columns, most)
}
