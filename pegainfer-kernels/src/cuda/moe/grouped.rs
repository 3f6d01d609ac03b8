//! The grouped GEMMs of a mixture of experts (csrc/moe/{gemv,mma,wgmma}.cu).

use crate::choice::GroupedGemm;
use crate::cuda::abi::{
    Entry, Map, MoeDownGemv, MoeDownMma, MoeDownWgmma, MoeGateUpGemv, MoeGateUpMma, MoeGateUpWgmma,
};
use crate::limits::{moe_gemv, moe_mma, moe_wgmma};
use crate::ops::{BlockScales, MatrixRef};
use pegainfer_core::cuda::{Cuda, Launch};
use pegainfer_core::tensor::{OpError, Tensor};

/// The op of all launches here.
pub(super) const OP: &str = "experts";

/// Entries by format (bf16, FP8), and for the GEMMs by tile.
const GATE_UP_GEMV: [Entry<MoeGateUpGemv<'static>>; 2] =
    [MoeGateUpGemv::moe_gate_up_gemv_bf16, MoeGateUpGemv::moe_gate_up_gemv_fp8];
const DOWN_GEMV: [Entry<MoeDownGemv<'static>>; 2] = [MoeDownGemv::moe_down_gemv_bf16, MoeDownGemv::moe_down_gemv_fp8];
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
const GATE_UP_WGMMA: [Entry<MoeGateUpWgmma<'static>>; 2] =
    [MoeGateUpWgmma::moe_gate_up_wgmma_64, MoeGateUpWgmma::moe_gate_up_wgmma_128];
const DOWN_WGMMA: [Entry<MoeDownWgmma<'static>>; 2] =
    [MoeDownWgmma::moe_down_wgmma_64, MoeDownWgmma::moe_down_wgmma_128];
const WGMMA_SHARED: [usize; 2] = [moe_wgmma::SHARED_BYTES_64, moe_wgmma::SHARED_BYTES_128];
/// Rows of a box of gates or ups, which alternate in a tile, and of a box of `down`.
const GATE_UP_BOX: usize = 8;
const DOWN_BOX: usize = 64;

/// One matrix of whole experts.
#[derive(Clone, Copy)]
pub(super) struct Weight<'a> {
    codes: &'a Tensor,
    /// Scales of an FP8 matrix.
    scales: Option<&'a Tensor>,
}

impl<'a> Weight<'a> {
    /// An error for a format or a shape without a kernel.
    pub fn of(w: MatrixRef<'a>) -> Result<Self, OpError> {
        let message = match w {
            MatrixRef::Bf16(codes) => return Ok(Self { codes, scales: None }),
            MatrixRef::Fp8(codes, BlockScales::F32(scales)) if codes.rows_cols().1.is_multiple_of(16) => {
                return Ok(Self { codes, scales: Some(scales) });
            }
            MatrixRef::Fp8(..) => "experts in FP8 of another width than a multiple of 16: use --device cpu",
            _ => "experts in a format other than bf16 and FP8 have no GPU kernel: use --device cpu",
        };
        Err(OpError { op: OP, message: message.to_owned() })
    }

    /// Index of the format among the entries.
    fn format(self) -> usize {
        usize::from(self.scales.is_some())
    }

    /// Device address of the scales, 0 without.
    fn scales(self) -> u64 {
        self.scales.map_or(0, Tensor::device)
    }
}

/// Pairs with some neighbouring experts, in tiles. Numbers of 64 bits are device addresses.
#[derive(Clone, Copy)]
pub(super) struct Tiles<'a> {
    /// Lists of `moe_group_pairs`; 0: each pair is a tile.
    pub tiles: u64,
    pub pairs: u64,
    /// Most tiles.
    pub most: usize,
    /// Experts of all pairs, from the tensor `choice`.
    pub chosen: u64,
    pub choice: &'a Tensor,
    pub first: usize,
    pub experts: usize,
}

/// Operands of `gate_up`, besides the weights.
pub(super) struct GateUp {
    pub x: u64,
    pub weights: u64,
    pub h: u64,
    pub experts_of_token: usize,
    pub width: usize,
    /// Columns of `x`.
    pub k: usize,
}

/// Operands of `down`, likewise.
pub(super) struct Down {
    pub h: u64,
    pub y: u64,
    pub hidden: usize,
    /// Columns of `h`.
    pub k: usize,
}

/// Row tiles of a block of a GEMV with so many columns, and warps that share each.
fn warps(k: usize) -> (usize, usize) {
    let most = moe_gemv::THREADS / 32;
    let splits = k.div_ceil(moe_gemv::COLUMNS).div_ceil(moe_gemv::UNITS).clamp(1, most);
    (most / splits, splits)
}

/// Bytes of shared memory of a block of a GEMM by mma.sync.
fn mma_shared(w: Weight<'_>, tile: usize) -> usize {
    let weights = moe_mma::ROWS * moe_mma::DEPTH * w.codes.dtype().size();
    moe_mma::STAGES * (weights + tile * (2 * moe_mma::DEPTH + 64))
}

/// Index of the entry for a tile of 16, 32 or 64 pairs, or of 64 or 128.
fn tile_index(tile: usize, least: usize) -> usize {
    (tile / least).ilog2() as usize
}

/// Launches `gate_up`. The kernel's successor may read the tiles before it waits.
#[rustfmt::skip]
pub(super) fn gate_up(
    gpu: &mut Cuda,
    kernel: GroupedGemm,
    w: Weight<'_>,
    Tiles { tiles, pairs, most, chosen, first, experts, .. }: Tiles<'_>,
    GateUp { x, weights, h, experts_of_token, width, k }: GateUp,
) -> Result<(), OpError> {
    let (format, codes, scales) = (w.format(), w.codes, w.scales());
    let (launch, row_tiles, threads) = match kernel {
        GroupedGemm::Gemv => {
            let (row_tiles, splits) = warps(k);
            let arguments = MoeGateUpGemv {
                x, w: codes, scales, chosen, tiles, pairs, weights, h, experts_of_token, first, experts, width, k,
                splits,
            };
            let launch = GATE_UP_GEMV[format].launch(gpu, OP, arguments)?.overlapped_late_release();
            (launch, width.div_ceil(row_tiles * moe_gemv::ROWS / 2), 32 * row_tiles * splits)
        }
        GroupedGemm::Mma(tile) => {
            let arguments = MoeGateUpMma {
                x, w: codes, scales, chosen, tiles, pairs, weights, h, experts_of_token, first, experts, width, k,
            };
            let launch = GATE_UP_MMA[format][tile_index(tile, 16)].launch(gpu, OP, arguments)?;
            let launch = launch.overlapped().shared(mma_shared(w, tile));
            (launch, width.div_ceil(moe_mma::ROWS / 2), moe_mma::THREADS)
        }
        GroupedGemm::Wgmma(tile) => {
            let w = Map::input(OP, codes, GATE_UP_BOX)?;
            let arguments = MoeGateUpWgmma { w, x, tiles, pairs, weights, h, experts_of_token, width, k };
            let entry = tile_index(tile, 64);
            let launch = GATE_UP_WGMMA[entry].launch(gpu, OP, arguments)?.overlapped().shared(WGMMA_SHARED[entry]);
            (launch, width.div_ceil(moe_wgmma::ROWS / 2), moe_wgmma::THREADS)
        }
    };
    // SAFETY: the op checked the shapes; the grid covers all columns of `h` of every tile.
    unsafe { launch.run([row_tiles, most, 1], threads) }
}

/// Launches `down`, right after `gate_up` of the same tiles.
#[rustfmt::skip]
pub(super) fn down(
    gpu: &mut Cuda,
    kernel: GroupedGemm,
    w: Weight<'_>,
    Tiles { tiles, pairs, most, chosen, choice, first, experts }: Tiles<'_>,
    Down { h, y, hidden, k }: Down,
) -> Result<(), OpError> {
    let (format, codes, scales) = (w.format(), w.codes, w.scales());
    let (launch, row_tiles, threads) = match kernel {
        GroupedGemm::Gemv => {
            let (row_tiles, splits) = warps(k);
            let arguments = MoeDownGemv {
                h, w: codes, scales, chosen, tiles, pairs, y, first, experts, hidden, k, splits,
            };
            let launch = DOWN_GEMV[format].launch(gpu, OP, arguments)?.early(codes).early(choice).overlapped();
            let launch = w.scales.into_iter().fold(launch, Launch::early);
            (launch, hidden.div_ceil(row_tiles * moe_gemv::ROWS), 32 * row_tiles * splits)
        }
        GroupedGemm::Mma(tile) => {
            let arguments = MoeDownMma { h, w: codes, scales, chosen, tiles, pairs, y, first, experts, hidden, k };
            let launch = DOWN_MMA[format][tile_index(tile, 16)].launch(gpu, OP, arguments)?;
            let launch = launch.overlapped().shared(mma_shared(w, tile));
            (launch, hidden.div_ceil(moe_mma::ROWS), moe_mma::THREADS)
        }
        GroupedGemm::Wgmma(tile) => {
            let w = Map::input(OP, codes, DOWN_BOX)?;
            let arguments = MoeDownWgmma { w, h, tiles, pairs, y, hidden, k };
            let entry = tile_index(tile, 64);
            let launch = DOWN_WGMMA[entry].launch(gpu, OP, arguments)?.overlapped().shared(WGMMA_SHARED[entry]);
            (launch, hidden.div_ceil(moe_wgmma::ROWS), moe_wgmma::THREADS)
        }
    };
    // SAFETY: the op checked the shapes; the grid covers all columns of `y` of every tile.
    unsafe { launch.run([row_tiles, most, 1], threads) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_warps_of_a_gemv_have_whole_shares() {
        // Columns, row tiles of a block, warps of each.
        let shares = [(128, (8, 1)), (512, (4, 2)), (768, (2, 3)), (1024, (2, 4)), (2048, (1, 8)), (8192, (1, 8))];
        for (k, expected) in shares {
            assert_eq!(warps(k), expected, "{k} columns");
        }
    }

    #[test]
    fn every_tile_has_an_entry() {
        assert_eq!([16, 32, 64].map(|tile| tile_index(tile, 16)), [0, 1, 2]);
        assert_eq!([64, 128].map(|tile| tile_index(tile, 64)), [0, 1]);
    }
}
