//! Launch of csrc/linear_stream.cu: products of few rows of x, whose weights stream past the tensor cores.

use super::images;
use pegainfer_core::cuda::{Cuda, Launch};
use pegainfer_core::tensor::{OpError, Tensor};

/// Most rows of x: from about 20 on, cuBLASLt is faster (a decode step of 32 rows of Qwen3-4B on an H200 by 0.2 of 4.6
/// ms). Hopper does without these kernels.
pub(super) const STREAM_ROWS: usize = 16;

/// As in csrc/linear_stream.cu.
const MAX_WARPS: usize = 12;
const RING_BYTES: usize = 3 * 4096; // of a warp
const STEP: usize = 128;
const CHUNK: usize = 256; // columns
const CHUNK_BYTES: usize = 4096; // for eight rows of x
/// Chunks of x that must fit when not all of them do.
const MIN_SLOTS: usize = 3;
/// Rows of w whose copies keep the memory busy, a block.
const BUSY_ROWS: usize = 72;
/// Columns below which a slice is not worth its part of the sum.
const MIN_SLICE: usize = 4 * STEP;
const MAX_SLICES: usize = 8;

/// What a block does with the sums.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Output {
    /// Writes them, rounded to bf16.
    Bf16,
    /// Writes them as f32.
    Logits,
    /// Writes those of each slice of the columns as f32: the reader adds them. A matrix with few rows fills the GPU.
    Slices,
    /// Gates half of them with the other half.
    Gated,
}

/// How a product is spread over the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Spread {
    /// Parts of the columns.
    slices: usize,
    slice: usize,
    blocks: usize,
    warps: usize,
    slots: usize,
    shared: usize,
}

/// Tiles of 8 rows that a kernel takes: 1 or 2.
fn tiles(m: usize) -> usize {
    m.div_ceil(8).next_power_of_two()
}

/// Spreads `n` rows of `k` columns so that every multiprocessor has one block and every block an even share, and warps
/// take whole tiles of rows where they can.
fn spread(m: usize, n: usize, k: usize, output: Output, gpu: (usize, usize)) -> Spread {
    let (multiprocessors, shared) = gpu;
    let (rows, tile) = if output == Output::Gated { (n / 2, 8) } else { (n, 16) };
    let enough = |slices: &usize| n * slices >= BUSY_ROWS * multiprocessors || k / (slices + 1) < MIN_SLICE;
    let slices = match output {
        Output::Slices => (1..MAX_SLICES).find(enough).unwrap_or(MAX_SLICES),
        _ => 1,
    };
    let slice = k.div_ceil(STEP).div_ceil(slices) * STEP;
    let slices = k.div_ceil(slice);
    let blocks = (multiprocessors / slices).clamp(1, rows.div_ceil(tile));
    let each = rows.div_ceil(blocks);
    let (chunks, chunk_bytes) = (slice.div_ceil(CHUNK), CHUNK_BYTES * tiles(m));
    // Fewer warps where shared memory is small.
    let room = shared.saturating_sub(MIN_SLOTS.min(chunks) * chunk_bytes) / RING_BYTES;
    let most = MAX_WARPS.min(room).max(1);
    let warps = each.div_ceil(tile * each.div_ceil(tile * most)).max(4.min(most));
    let slots = chunks.min((shared.saturating_sub(warps * RING_BYTES)) / chunk_bytes);
    // More than half, see csrc/linear_stream.cu.
    let shared = (warps * RING_BYTES + slots * chunk_bytes).max(shared / 2 + 1024);
    Spread { slices, slice, blocks, warps, slots, shared }
}

/// Launches the product of `x` and `w`, whose results `out` takes as the kernel's output argument. Returns the number of
/// slices.
pub(super) fn stream(
    gpu: &mut Cuda,
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    output: Output,
    out: impl FnOnce(Launch) -> Launch,
) -> Result<usize, OpError> {
    let ((m, k), n) = (x.rows_cols(), w.rows_cols().0);
    let kernels = match output {
        Output::Bf16 => ["stream_bf16_8", "stream_bf16_16"],
        Output::Logits | Output::Slices => ["stream_f32_8", "stream_f32_16"],
        Output::Gated => ["stream_gated_8", "stream_gated_16"],
    };
    let spread = spread(m, n, k, output, (gpu.multiprocessors(), gpu.shared_memory()));
    let kernel = kernels[tiles(m).ilog2() as usize];
    let launch = out(gpu.launch(op, &images::LINEAR_STREAM, kernel)?.input(x).input(w));
    let launch = launch.u32(m).u32(n).u32(k).u32(spread.slice).u32(spread.slots).overlapped();
    // SAFETY: matches csrc/linear_stream.cu; the op checked the shapes, and `spread` covers all rows and columns.
    unsafe { launch.shared(spread.shared).run([spread.blocks, spread.slices, 1], 32 * spread.warps)? };
    Ok(spread.slices)
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: (usize, usize) = (132, 232_448);

    #[test]
    fn a_qwen3_4b_layer_fills_an_h200() {
        let of = |n, k, output| {
            let s = spread(1, n, k, output, H200);
            (s.slices, s.blocks, s.warps)
        };
        assert_eq!(of(6144, 2560, Output::Bf16), (1, 132, 4));
        assert_eq!(of(2560, 4096, Output::Slices), (4, 33, 5));
        assert_eq!(of(19456, 2560, Output::Gated), (1, 132, 10));
        assert_eq!(of(2560, 9728, Output::Slices), (4, 33, 5));
        assert_eq!(of(151_936, 2560, Output::Logits), (1, 132, 12));
    }

    #[test]
    fn slices_cover_the_columns_and_everything_fits() {
        for gpu in [H200, (84, 101_376), (108, 166_912), (20, 101_376)] {
            for (n, k) in [(2560, 4096), (16, 96), (1024, 3072), (1024, 128), (5120, 17_408), (256, 64)] {
                for m in 1..=STREAM_ROWS {
                    for output in [Output::Bf16, Output::Slices, Output::Gated] {
                        let s = spread(m, n, k, output, gpu);
                        assert!(s.slices * s.slice >= k && (s.slices - 1) * s.slice < k, "{s:?}");
                        assert!(s.shared <= gpu.1 && s.warps >= 1 && s.warps <= MAX_WARPS, "{s:?}");
                        assert!(s.slots >= MIN_SLOTS.min(s.slice.div_ceil(CHUNK)), "{s:?}");
                        assert!(s.warps * RING_BYTES + s.slots * CHUNK_BYTES * tiles(m) <= s.shared, "{s:?}");
                    }
                }
            }
        }
    }
}
