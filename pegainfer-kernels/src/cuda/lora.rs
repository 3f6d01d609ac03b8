//! Launches of csrc/lora/adapters.cu.

use super::abi::{LoraExpand, LoraShrink};
use super::scratch::Scratch;
use super::vectors;
use crate::adapter_matrices::AdapterMatrices;
use crate::limits::lora::{COLUMNS, EXPAND_THREADS, MAX_SEGMENTS, MAX_SPLITS, ROWS, SHRINK_ROWS, SHRINK_THREADS, UNIT};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

const OP: &str = "lora";

/// Columns of a split of `k`: a unit for each warp of a block, or several if there would be too many splits.
fn split_columns(k: usize) -> usize {
    let of_block = SHRINK_THREADS / 32 * UNIT;
    k.div_ceil(MAX_SPLITS).next_multiple_of(of_block)
}

/// See [`ops::lora`](crate::ops::lora::add_adapters).
pub(crate) fn add_adapters(
    exec: &mut Exec,
    x: &Tensor,
    AdapterMatrices { a, b, segments }: &AdapterMatrices,
    slots: &Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let ((rows, k), (adapters, _), (_, width)) = (x.rows_cols(), a.rows_cols(), out.rows_cols());
    let rank = b.shape().last().copied().unwrap_or(0);
    for vector in [k, rank, width] {
        vectors(OP, vector)?;
    }
    let (n, split_columns) = (segments.len() * rank, split_columns(k));
    let (splits, mut scratch) = (k.div_ceil(split_columns), Scratch::new(exec)?);
    let row_bytes = splits * n * DType::F32.size();
    let step = (scratch.left() / row_bytes / ROWS * ROWS).clamp(ROWS, rows.next_multiple_of(ROWS));
    let sums = scratch.take(OP, step * row_bytes)?;
    let ends: [usize; MAX_SEGMENTS] = std::array::from_fn(|i| segments.iter().take(i + 1).sum());
    let ([end0, end1, end2, end3], segments, gpu) = (ends, segments.len(), exec.gpu()?);
    for begin in (0..rows).step_by(step) {
        let end = rows.min(begin + step);
        let tiles = (end - begin).div_ceil(ROWS) * adapters;
        let arguments = LoraShrink { x, a, slots, sums, begin, end, k, n, adapters, split_columns };
        let launch = LoraShrink::lora_shrink.launch(gpu, OP, arguments)?.early(a).early(slots).overlapped();
        // SAFETY: the op checked the shapes; `sums` has the splits of these rows.
        unsafe { launch.run([n.div_ceil(SHRINK_ROWS), splits, tiles], SHRINK_THREADS)? };
        let (begin_row, end_row, out) = (begin, end, &mut *out);
        let arguments = LoraExpand {
            sums,
            b,
            slots,
            out,
            begin_row,
            end_row,
            width,
            rank,
            adapters,
            splits,
            segments,
            end0,
            end1,
            end2,
            end3,
        };
        let launch = LoraExpand::lora_expand.launch(gpu, OP, arguments)?.early(b).early(slots).overlapped();
        // SAFETY: as above; the grid covers all columns of the segments.
        unsafe { launch.run([end3.div_ceil(COLUMNS), tiles, 1], EXPAND_THREADS)? };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_depend_on_the_columns_alone_and_are_few() {
        for (k, expected) in [(64_usize, 1), (1024, 1), (2560, 3), (4096, 4), (9728, 10), (25600, 13)] {
            assert_eq!(k.div_ceil(split_columns(k)), expected, "{k} columns");
        }
    }
}
