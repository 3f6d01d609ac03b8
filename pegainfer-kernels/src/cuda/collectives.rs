//! Collectives of several GPUs (csrc/collectives/push.cu).

use super::abi::{AllGather, AllReduce, Entry, ExchangeParts};
use crate::limits::collectives::{HEADER_BYTES, LL_THREADS, MAILBOX_BYTES, MAX_BLOCKS, MAX_RANKS, THREADS};
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::{
    record_all_gather, record_all_gather_rows, record_all_reduce, record_reduce_scatter, rows_of_rank,
};
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Bytes of a vector.
const VECTOR: usize = 16;

/// Algorithm of an all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// One hop, with a flag per word (NCCL's LL protocol): twice the bytes, the lowest latency.
    LowLatency,
    /// One hop, with a flag per block.
    OneShot,
    /// Reduce-scatter and all-gather: two hops, the fewest bytes from three ranks on.
    TwoShot,
}

/// Maximum bytes for [`Algorithm::LowLatency`] with up to four ranks; beyond, a flag per block is cheaper (measured
/// with two and four H200s). With more ranks: the same number of bytes to all others.
const LOW_LATENCY_BYTES: usize = 256 << 10;

/// Maximum bytes for [`Algorithm::OneShot`] with four ranks (measured). With more ranks: the same number of bytes to
/// all others.
const ONE_SHOT_BYTES: usize = 1 << 20;

impl Algorithm {
    /// The one for a message of `bytes` bytes.
    pub fn choose(ranks: usize, bytes: usize) -> Self {
        let to_others = bytes * (ranks - 1);
        match bytes {
            _ if bytes <= LOW_LATENCY_BYTES && to_others <= 3 * LOW_LATENCY_BYTES => Self::LowLatency,
            _ if ranks == 2 || to_others <= 3 * ONE_SHOT_BYTES => Self::OneShot,
            _ => Self::TwoShot,
        }
    }

    /// Name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::LowLatency => "low_latency",
            Self::OneShot => ONE_SHOT,
            Self::TwoShot => "two_shot",
        }
    }

    /// Bytes that a rank sends to all others for a message of `bytes` bytes, without the flags of blocks.
    pub fn sent(self, ranks: usize, bytes: usize) -> u64 {
        let to_others = (bytes * (ranks - 1)) as u64;
        match self {
            // A flag for each word.
            Self::LowLatency => 2 * to_others,
            Self::OneShot => to_others,
            // Its part of each other rank's slice, then its sums to each.
            Self::TwoShot => 2 * to_others / ranks as u64,
        }
    }
}

/// Name of [`Algorithm::OneShot`], and of how an all-gather travels.
pub const ONE_SHOT: &str = "one_shot";

/// One rank's view of the arenas of all ranks.
#[derive(Debug, Clone, Copy)]
pub struct Link {
    rank: usize,
    ranks: usize,
    /// Address of its own arena.
    arena: u64,
    /// Addresses of its mailbox in the arena of each rank.
    to: [u64; MAX_RANKS],
    stage_bytes: usize,
    /// Address of the status words.
    status: u64,
    /// Timeout of a wait, in nanoseconds.
    timeout: u64,
    /// Maximum number of blocks of a launch, a power of two.
    blocks: usize,
    /// True if its messages come back to it.
    alone: bool,
}

/// Staging bytes of all mailboxes of one half together. A rank's share is the maximum that one launch sends to a peer.
const STAGE_BYTES: usize = 32 << 20;

fn stage_bytes(ranks: usize) -> usize {
    (STAGE_BYTES / ranks) & !511
}

fn mailbox(rank: usize, ranks: usize) -> u64 {
    (HEADER_BYTES + rank * (MAILBOX_BYTES + 2 * stage_bytes(ranks))) as u64
}

impl Link {
    /// Bytes of an arena, zero at first.
    pub fn arena_bytes(ranks: usize) -> usize {
        mailbox(ranks, ranks) as usize
    }

    /// The view of `rank`. `multiprocessors`: the fewest of any rank's GPU, because every rank has the same grid.
    pub fn new(rank: usize, arenas: &[u64], status: u64, timeout: u64, multiprocessors: usize) -> Self {
        let ranks = arenas.len();
        assert!((2..=MAX_RANKS).contains(&ranks), "{ranks} ranks");
        let mut to = [0; MAX_RANKS];
        to.iter_mut().zip(arenas).for_each(|(to, arena)| *to = arena + mailbox(rank, ranks));
        let blocks = (1 << multiprocessors.max(1).ilog2()).min(MAX_BLOCKS);
        Self {
            rank,
            ranks,
            arena: arenas[rank],
            to,
            stage_bytes: stage_bytes(ranks),
            status,
            timeout,
            blocks,
            alone: false,
        }
    }

    /// View of a single rank of several: messages to a peer come back as the peer's.
    pub fn loop_back(
        (rank, ranks): (usize, usize),
        arena: u64,
        status: u64,
        timeout: u64,
        multiprocessors: usize,
    ) -> Self {
        let mut link = Self::new(rank, &vec![arena; ranks], status, timeout, multiprocessors);
        link.to.iter_mut().take(ranks).enumerate().for_each(|(peer, to)| *to = arena + mailbox(peer, ranks));
        Self { alone: true, ..link }
    }

    /// Index of the kernel for two, four or eight ranks.
    fn variant(&self) -> usize {
        self.ranks.next_power_of_two().ilog2() as usize - 1
    }

    /// Maximum number of vectors of one launch.
    fn capacity(&self, algorithm: Algorithm) -> usize {
        match algorithm {
            Algorithm::LowLatency => self.blocks * LL_THREADS / 2,
            Algorithm::OneShot => self.stage_bytes / VECTOR,
            Algorithm::TwoShot => self.ranks * (self.stage_bytes / 2 / VECTOR),
        }
    }

    /// Blocks and threads of a launch, the same on every rank.
    fn grid(&self, algorithm: Algorithm, vectors: usize) -> ([usize; 3], usize) {
        let (blocks, threads) = match algorithm {
            Algorithm::LowLatency => ((2 * vectors).div_ceil(LL_THREADS).next_power_of_two(), LL_THREADS),
            Algorithm::OneShot | Algorithm::TwoShot => (1 << (vectors / THREADS).max(1).ilog2(), THREADS),
        };
        ([blocks.min(self.blocks), 1, 1], threads)
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arenas_hold_every_message_and_mailboxes_do_not_overlap() {
        for ranks in 2..=MAX_RANKS {
            let arenas: Vec<u64> = (0..ranks).map(|rank| (rank as u64) << 40).collect();
            let links: Vec<Link> = (0..ranks).map(|rank| Link::new(rank, &arenas, 0, 1, 132)).collect();
            let stage = links[0].stage_bytes;
            assert_eq!((links[0].blocks, stage % 512), (128, 0));
            for (peer, arena) in arenas.iter().enumerate() {
                let starts: Vec<u64> = links.iter().map(|link| link.to[peer] - arena).collect();
                assert_eq!(starts[0], HEADER_BYTES as u64);
                assert!(starts.windows(2).all(|w| w[1] - w[0] == (MAILBOX_BYTES + 2 * stage) as u64));
                assert!(starts.iter().all(|start| start.is_multiple_of(VECTOR as u64)));
                let end = starts[ranks - 1] as usize + MAILBOX_BYTES + 2 * stage;
                assert_eq!(end, Link::arena_bytes(ranks));
            }
            let part = links[0].capacity(Algorithm::TwoShot).div_ceil(ranks);
            assert!(part * VECTOR <= stage / 2 && links[0].capacity(Algorithm::OneShot) * VECTOR <= stage);
        }
    }

    #[test]
    fn grids_are_powers_of_two_that_are_resident_and_cover_the_message() {
        for (multiprocessors, most) in [(132, 128), (58, 32), (128, 128), (200, 128)] {
            let link = Link::new(0, &[0, 1 << 40], 0, 1, multiprocessors);
            for vectors in [1, 63, 64, 65, 1024, 4096, 16_384, 1 << 20] {
                for algorithm in [Algorithm::LowLatency, Algorithm::OneShot, Algorithm::TwoShot] {
                    let vectors = vectors.min(link.capacity(algorithm));
                    let ([blocks, ..], threads) = link.grid(algorithm, vectors);
                    assert!(blocks.is_power_of_two() && blocks <= most, "{algorithm:?} {vectors}: {blocks}");
                    assert!(algorithm != Algorithm::LowLatency || 2 * vectors <= blocks * threads);
                }
            }
        }
    }

    #[test]
    fn more_bytes_take_the_algorithm_that_sends_fewer() {
        use Algorithm::{LowLatency, OneShot, TwoShot};
        let of = |ranks: usize| [16 << 10, 256 << 10, 1 << 20, 16 << 20].map(|bytes| Algorithm::choose(ranks, bytes));
        assert_eq!(of(2), [LowLatency, LowLatency, OneShot, OneShot]);
        assert_eq!(of(4), [LowLatency, LowLatency, OneShot, TwoShot]);
        assert_eq!(of(8), [LowLatency, OneShot, TwoShot, TwoShot]);
        let sent = |ranks| [LowLatency, OneShot, TwoShot].map(|algorithm| algorithm.sent(ranks, 1024));
        assert_eq!((sent(2), sent(4)), ([2048, 1024, 1024], [6144, 3072, 1536]));
    }
}
