//! Launch of csrc/linear_wide.cu: products of up to about a hundred rows of x on Hopper's warpgroups.

use super::attention_prefill::HOPPER;
use super::images;
use super::stream::Output;
use pegainfer_core::cuda::{BOX_COLUMNS, Cuda, Launch, TensorMap};
use pegainfer_core::tensor::{OpError, Tensor};
use std::ops::RangeInclusive;

/// Rows of x: those for which these kernels are faster than cuBLASLt, and at least as fast as those of
/// csrc/linear_stream.cu; see docs/benchmarks/h200-kernels.md.
const WIDE_ROWS: RangeInclusive<usize> = 1..=96;

/// As in csrc/linear_wide.cu.
const TILE_ROWS: usize = 64;
const MAX_WARPGROUPS: usize = 2;
const FETCHERS: usize = 64;
const BOXES: usize = 2;
const STEP: usize = BOXES * BOX_COLUMNS;
/// Bytes of a step's columns.
const ROW_BYTES: usize = STEP * 2;
/// Bytes of the two barriers of a slot.
const BARRIER_BYTES: usize = 16;
/// Bytes of weights under way in a block.
const RING_BYTES: usize = 112 << 10;
/// Bytes of x, for up to 32, 64 and 96 rows.
const INPUT_RING_BYTES: [usize; 3] = [64 << 10, 96 << 10, 96 << 10];
/// Steps of tiles that a block fetches before the kernels that produce x are done: more delays what those wait for.
const AHEAD: usize = 4;
/// Columns below which a slice is not worth its part of the sum.
const MIN_SLICE: usize = 512;
const MAX_SLICES: usize = 8;

/// How a product is spread over the GPU; as the parameters of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Plan {
    slices: usize,
    slice: usize,
    blocks: usize,
    warpgroups: usize,
    passes: usize,
    rows: usize,
    slots: usize,
    input_slots: usize,
    shared: usize,
}

/// Whether `gpu` runs these kernels for `m` rows of x.
pub(super) fn is_wide(gpu: &Cuda, m: usize) -> bool {
    gpu.capability() == HOPPER && WIDE_ROWS.contains(&m)
}

/// Rows of x that the kernel for `m` of them takes, as the place in a list of kernels for 32, 64 and 96.
fn width(m: usize) -> usize {
    m.div_ceil(32) - 1
}

/// Tiles that a warpgroup sums at once: more read x less often, where there are many.
fn tiles(m: usize, output: Output) -> usize {
    match output {
        Output::Bf16 | Output::Slices => 1,
        Output::Gated => 2,
        Output::Logits => [4, 2, 2][width(m)],
    }
}

/// Deals `n` rows of `k` columns to blocks in even shares, and each share to warpgroups in even tiles.
fn plan(m: usize, n: usize, k: usize, output: Output, multiprocessors: usize) -> Plan {
    let rows = if output == Output::Gated { n / 2 } else { n };
    let slices = match output {
        // As many as leave a block one tile.
        Output::Slices => (multiprocessors * TILE_ROWS / n).min(k / MIN_SLICE).clamp(1, MAX_SLICES),
        _ => 1,
    };
    let slice = k.div_ceil(STEP).div_ceil(slices) * STEP;
    let slices = k.div_ceil(slice);
    let blocks = (multiprocessors / slices).clamp(1, rows.div_ceil(8));
    // Tiles of logits begin at whole pieces of 32 bytes.
    let unit = if output == Output::Logits { 8 } else { 1 };
    let share = rows.div_ceil(unit).div_ceil(blocks) * unit;
    // A gated tile has its two halves in two sums of the same warpgroup.
    let each = if output == Output::Gated { 1 } else { tiles(m, output) };
    let wanted = share.div_ceil(TILE_ROWS);
    let warpgroups = wanted.div_ceil(each).min(MAX_WARPGROUPS);
    let passes = wanted.div_ceil(each * warpgroups);
    let rows = share.div_ceil(each * warpgroups * passes).next_multiple_of(unit);
    let (slot, input_slot) = (rows.next_multiple_of(8) * ROW_BYTES, 32 * (width(m) + 1) * ROW_BYTES);
    // A slot is always of the same warpgroup: another one's would pass a barrier of which it missed a round.
    let (slots, input_slots) = (RING_BYTES / slot / warpgroups * warpgroups, INPUT_RING_BYTES[width(m)] / input_slot);
    let shared = slots * slot + input_slots * input_slot + (slots + input_slots) * BARRIER_BYTES;
    Plan { slices, slice, blocks, warpgroups, passes, rows, slots, input_slots, shared }
}

/// Launches the product of `x` and `w`, whose results `out` takes as the kernel's output argument. Returns the number of
/// slices.
pub(super) fn wide(
    gpu: &mut Cuda,
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    output: Output,
    out: impl FnOnce(Launch) -> Launch,
) -> Result<usize, OpError> {
    let ((m, k), n) = (x.rows_cols(), w.rows_cols().0);
    let kernels = match output {
        Output::Bf16 => ["wide_bf16_32", "wide_bf16_64", "wide_bf16_96"],
        Output::Slices => ["wide_f32_32", "wide_f32_64", "wide_f32_96"],
        Output::Logits => ["wide_logits_32", "wide_logits_64", "wide_logits_96"],
        Output::Gated => ["wide_gated_32", "wide_gated_64", "wide_gated_96"],
    };
    let plan = plan(m, n, k, output, gpu.multiprocessors());
    let (x, w) = (TensorMap::new(op, x, m)?, TensorMap::new(op, w, plan.rows)?);
    let launch = out(gpu.launch(op, &images::LINEAR_WIDE, kernels[width(m)])?.map(x).map(w)).overlapped();
    let launch = launch.u32(m).u32(n).u32(k).u32(plan.slice).u32(plan.rows).u32(plan.passes);
    let launch = launch.u32(plan.slots).u32(plan.input_slots).u32(AHEAD).shared(plan.shared);
    // SAFETY: matches csrc/linear_wide.cu; the op checked the shapes, and `plan` covers all rows and columns.
    unsafe { launch.run([plan.blocks, plan.slices, 1], 128 * plan.warpgroups + FETCHERS)? };
    Ok(plan.slices)
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: (usize, usize) = (132, 232_448);

    #[test]
    fn a_qwen3_4b_layer_fills_an_h200() {
        let of = |n, k, output| {
            let p = plan(64, n, k, output, H200.0);
            (p.slices, p.blocks, p.warpgroups, p.passes, p.rows)
        };
        assert_eq!(of(6144, 2560, Output::Bf16), (1, 132, 1, 1, 47));
        assert_eq!(of(2560, 4096, Output::Slices), (3, 44, 1, 1, 59));
        assert_eq!(of(19456, 2560, Output::Gated), (1, 132, 2, 1, 37));
        assert_eq!(of(2560, 9728, Output::Slices), (3, 44, 1, 1, 59));
        assert_eq!(of(12_352, 2560, Output::Bf16), (1, 132, 2, 1, 47));
    }

    #[test]
    fn everything_is_covered_and_fits() {
        let shapes =
            [(2560, 4096), (16, 96), (1024, 3072), (320, 896), (5120, 17_408), (8, 8), (151_936, 2560), (248, 64)];
        for (n, k) in shapes {
            for m in WIDE_ROWS {
                for output in [Output::Bf16, Output::Logits, Output::Slices, Output::Gated] {
                    let p = plan(m, n, k, output, H200.0);
                    assert!(p.slices * p.slice >= k && (p.slices - 1) * p.slice < k, "{p:?}");
                    let (rows, each) = if output == Output::Gated { (n / 2, 1) } else { (n, tiles(m, output)) };
                    assert!(p.blocks * p.slices <= H200.0 && p.rows <= TILE_ROWS, "{p:?}");
                    assert!(output != Output::Logits || p.rows.is_multiple_of(8), "{p:?}");
                    assert!(p.blocks * p.passes * p.warpgroups * each * p.rows >= rows, "{p:?}");
                    assert!(p.slots >= 2 * p.warpgroups && p.slots.is_multiple_of(p.warpgroups), "{p:?}");
                    // One block a multiprocessor, as in csrc/linear_stream.cu.
                    assert!(p.shared <= H200.1 && p.shared > H200.1 / 2, "{p:?}");
                    // The tensor cores read whole tiles, also of the last slot.
                    assert!(p.input_slots * 32 * (width(m) + 1) >= TILE_ROWS, "{p:?}");
                }
            }
        }
    }
}
