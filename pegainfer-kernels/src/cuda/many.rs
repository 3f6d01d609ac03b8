//! What the launches of csrc/many.cuh share: products of many rows on Hopper's warpgroups.

use super::attention_prefill::HOPPER;
use pegainfer_core::cuda::{BOX_COLUMNS, Cuda};

/// As in csrc/many.cuh.
pub(super) const ROWS: usize = 128;
pub(super) const WEIGHTS: usize = 256;
/// Rows of a box of the weights.
pub(super) const BOX_ROWS: usize = 64;
pub(super) const STORE_ROWS: usize = 16;
pub(super) const THREADS: usize = 3 * 128;
const STAGES: usize = 4;
const WARPS: usize = 8;
/// Bytes of a bf16.
pub(super) const ELEMENT: usize = 2;
/// Bytes of `Shared`: steps of x and w, results of each warp, and two barriers a step.
pub(super) const SHARED: usize = STAGES * (ROWS + WEIGHTS) * BOX_COLUMNS * ELEMENT
    + WARPS * 2 * STORE_ROWS * BOX_COLUMNS * ELEMENT
    + STAGES * 2 * size_of::<u64>();
/// What a block has on Hopper.
pub(super) const MAX_SHARED: usize = 227 << 10;
const _: () = assert!(SHARED <= MAX_SHARED);
/// Tiles along the rows that are done before the next columns: 4,096 rows of x stay in an H200's L2.
pub(super) const GROUP: usize = 32;

/// Whether `gpu` runs these kernels where they have `parts` parts of a tile to do between the steps of the next, which
/// has `k` columns.
pub(super) fn takes(gpu: &Cuda, k: usize, parts: usize) -> bool {
    gpu.capability() == HOPPER && k >= parts * BOX_COLUMNS
}
