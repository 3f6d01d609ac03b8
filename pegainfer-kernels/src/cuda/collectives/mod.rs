//! Collectives of several GPUs (csrc/collectives).

mod add_norm;
mod algorithm;
mod link;

pub use add_norm::reduce_add_norm;
pub use algorithm::{Algorithm, ONE_SHOT, fused};
pub use link::{Grid, Link};

use super::abi::{AllGather, AllReduce, Entry, ExchangeParts};
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::{
    record_all_gather, record_all_gather_rows, record_all_reduce, record_reduce_scatter, rows_of_rank,
};
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Bytes of a vector.
const VECTOR: usize = 16;

/// Kernels for two, four and eight ranks, for f32 and bf16.
fn entry(algorithm: Algorithm, variant: usize, dtype: DType) -> Entry<AllReduce<'static>> {
    type A = AllReduce<'static>;
    let entries = match algorithm {
        Algorithm::LowLatency => [
            [A::all_reduce_ll_f32_2, A::all_reduce_ll_bf16_2],
            [A::all_reduce_ll_f32_4, A::all_reduce_ll_bf16_4],
            [A::all_reduce_ll_f32_8, A::all_reduce_ll_bf16_8],
        ],
        Algorithm::OneShot => [
            [A::all_reduce_one_shot_f32_2, A::all_reduce_one_shot_bf16_2],
            [A::all_reduce_one_shot_f32_4, A::all_reduce_one_shot_bf16_4],
            [A::all_reduce_one_shot_f32_8, A::all_reduce_one_shot_bf16_8],
        ],
        Algorithm::TwoShot => [
            [A::all_reduce_two_shot_f32_2, A::all_reduce_two_shot_bf16_2],
            [A::all_reduce_two_shot_f32_4, A::all_reduce_two_shot_bf16_4],
            [A::all_reduce_two_shot_f32_8, A::all_reduce_two_shot_bf16_8],
        ],
    };
    entries[variant][usize::from(dtype == DType::Bf16)]
}

/// Replaces `x`, f32 or bf16, by its sum over the ranks, added in rank order. Without an `algorithm`, chooses by size.
/// Messages larger than the arenas take several launches.
pub fn all_reduce(exec: &mut Exec, link: &Link, algorithm: Option<Algorithm>, x: &mut Tensor) -> Result<(), OpError> {
    let (op, bytes, dtype) = ("all_reduce", x.bytes() as usize, x.dtype());
    if !bytes.is_multiple_of(VECTOR) || !x.device().is_multiple_of(VECTOR as u64) {
        return Err(OpError { op, message: format!("{bytes} bytes: GPUs add whole vectors of {VECTOR} bytes") });
    }
    let algorithm = algorithm.unwrap_or_else(|| Algorithm::choose(link.ranks, bytes));
    // The parts of a single rank are not where those of other ranks would be.
    let algorithm = if link.alone && algorithm == Algorithm::TwoShot { Algorithm::OneShot } else { algorithm };
    record_all_reduce(exec, algorithm.name(), x, link.ranks, algorithm.sent(link.ranks, bytes));
    let (vectors, capacity, gpu) = (bytes / VECTOR, link.capacity(algorithm), exec.gpu()?);
    for first in (0..vectors).step_by(capacity) {
        let count = capacity.min(vectors - first);
        let (grid, threads) = link.grid(algorithm, count);
        let Link { rank, ranks, arena, to: [to_0, to_1, to_2, to_3, to_4, to_5, to_6, to_7], .. } = *link;
        let Link { stage_bytes, status, timeout, .. } = *link;
        let (x, first) = (&mut *x, first as u64);
        #[rustfmt::skip]
        let arguments = AllReduce {
            x, first, vectors: count, rank, ranks, arena, to_0, to_1, to_2, to_3, to_4, to_5, to_6, to_7, stage_bytes,
            status, timeout,
        };
        let launch = entry(algorithm, link.variant(), dtype).launch(gpu, op, arguments)?.overlapped();
        // SAFETY: the vectors lie within `x`; the link has the addresses of live arenas of the size that it names.
        unsafe { launch.run(grid, threads)? };
    }
    Ok(())
}

/// Puts the columns of all ranks side by side: `part` is `[rows, width]` f32, `whole` `[rows, ranks * width]`.
pub fn all_gather(exec: &mut Exec, link: &Link, part: &Tensor, whole: &mut Tensor) -> Result<(), OpError> {
    let (op, (rows, columns)) = ("all_gather", part.rows_cols());
    let message = |message| OpError { op, message };
    if whole.rows_cols() != (rows, link.ranks * columns) {
        let (part, whole, ranks) = (part.shape(), whole.shape(), link.ranks);
        return Err(message(format!("{ranks} ranks with {part:?} do not make {whole:?}")));
    }
    let width = columns * size_of::<f32>() / VECTOR;
    let at_once = (link.stage_bytes / VECTOR).checked_div(width).unwrap_or(1);
    if !(columns * size_of::<f32>()).is_multiple_of(VECTOR) || at_once == 0 {
        let most = link.stage_bytes / size_of::<f32>();
        return Err(message(format!("rows of {columns} elements: GPUs exchange multiples of 4, at most {most}")));
    }
    record_all_gather(exec, ONE_SHOT, part, whole, link.ranks);
    let gpu = exec.gpu()?;
    for first in (0..rows).step_by(at_once) {
        let rows = at_once.min(rows - first);
        let (grid, threads) = link.grid(Algorithm::OneShot, rows * width);
        let Link { rank, ranks, arena, to: [to_0, to_1, to_2, to_3, to_4, to_5, to_6, to_7], .. } = *link;
        let Link { stage_bytes, status, timeout, .. } = *link;
        let whole = &mut *whole;
        #[rustfmt::skip]
        let arguments = AllGather {
            part, whole, first, rows, width, rank, ranks, arena, to_0, to_1, to_2, to_3, to_4, to_5, to_6, to_7,
            stage_bytes, status, timeout,
        };
        let variants =
            [AllGather::all_gather_columns_2, AllGather::all_gather_columns_4, AllGather::all_gather_columns_8];
        let launch = variants[link.variant()].launch(gpu, op, arguments)?.overlapped();
        // SAFETY: as above; the rows lie within both tensors.
        unsafe { launch.run(grid, threads)? };
    }
    Ok(())
}

/// Replaces this rank's equal share of the rows of `x`, f32 or bf16, by the sums over the ranks, added in rank order.
pub fn reduce_scatter(exec: &mut Exec, link: &Link, x: &mut Tensor) -> Result<(), OpError> {
    type A = ExchangeParts<'static>;
    let entries = match x.dtype() {
        DType::F32 => [A::reduce_scatter_f32_2, A::reduce_scatter_f32_4, A::reduce_scatter_f32_8],
        _ => [A::reduce_scatter_bf16_2, A::reduce_scatter_bf16_4, A::reduce_scatter_bf16_8],
    };
    record_reduce_scatter(exec, ONE_SHOT, x, link.ranks);
    exchange_parts(exec, "reduce_scatter", link, entries[link.variant()], x)
}

/// Gives every rank the rows of all; each rank has an equal share of the rows of `x`, f32 or bf16.
pub fn all_gather_rows(exec: &mut Exec, link: &Link, x: &mut Tensor) -> Result<(), OpError> {
    type A = ExchangeParts<'static>;
    let entries = match x.dtype() {
        DType::F32 => [A::all_gather_rows_f32_2, A::all_gather_rows_f32_4, A::all_gather_rows_f32_8],
        _ => [A::all_gather_rows_bf16_2, A::all_gather_rows_bf16_4, A::all_gather_rows_bf16_8],
    };
    record_all_gather_rows(exec, ONE_SHOT, x, link.ranks);
    exchange_parts(exec, "all_gather_rows", link, entries[link.variant()], x)
}

/// Launches `entry` over the parts of all ranks, which are adjacent in `x`, as often as the size of the arenas
/// requires.
fn exchange_parts(
    exec: &mut Exec,
    op: &'static str,
    link: &Link,
    entry: Entry<ExchangeParts<'static>>,
    x: &mut Tensor,
) -> Result<(), OpError> {
    let bytes = rows_of_rank(op, x, link.ranks)? * x.rows_cols().1 * x.dtype().size();
    if !bytes.is_multiple_of(VECTOR) || !x.device().is_multiple_of(VECTOR as u64) {
        return Err(OpError { op, message: format!("{bytes} bytes: GPUs exchange whole vectors of {VECTOR} bytes") });
    }
    let (part, capacity, gpu) = (bytes / VECTOR, link.capacity(Algorithm::OneShot), exec.gpu()?);
    for first in (0..part).step_by(capacity) {
        let count = capacity.min(part - first);
        let (grid, threads) = link.grid(Algorithm::OneShot, count);
        let Link { rank, ranks, arena, to: [to_0, to_1, to_2, to_3, to_4, to_5, to_6, to_7], .. } = *link;
        let Link { stage_bytes, status, timeout, alone, .. } = *link;
        let (x, alone) = (&mut *x, usize::from(alone));
        #[rustfmt::skip]
        let arguments = ExchangeParts {
            x, part, first, count, alone, rank, ranks, arena, to_0, to_1, to_2, to_3, to_4, to_5, to_6, to_7,
            stage_bytes, status, timeout,
        };
        let launch = entry.launch(gpu, op, arguments)?.overlapped();
        // SAFETY: the vectors lie within the parts of `x`; the link has the addresses of live arenas of the size that
        // it names.
        unsafe { launch.run(grid, threads)? };
    }
    Ok(())
}
