//! Algorithms of collectives, and their choice by size.

use crate::limits::collectives::{PUSH_THREADS, ROW_THREADS};
use half::bf16;

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

/// Maximum bytes for [`Algorithm::OneShot`] with two ranks; beyond, two hops take less memory traffic (measured with
/// two H200s).
const ONE_SHOT_BYTES_OF_TWO: usize = 8 << 20;

/// Maximum bytes for [`Algorithm::OneShot`] with four ranks (measured). With more ranks: the same number of bytes to
/// all others.
const ONE_SHOT_BYTES: usize = 1 << 20;

impl Algorithm {
    /// The one for a message of `bytes` bytes.
    pub fn choose(ranks: usize, bytes: usize) -> Self {
        let to_others = bytes * (ranks - 1);
        match bytes {
            _ if bytes <= LOW_LATENCY_BYTES && to_others <= 3 * LOW_LATENCY_BYTES => Self::LowLatency,
            _ if ranks == 2 && bytes <= ONE_SHOT_BYTES_OF_TWO || to_others <= 3 * ONE_SHOT_BYTES => Self::OneShot,
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

/// Maximum bytes for [`Algorithm::LowLatency`] in [`fused`] with two ranks (measured up to 256 KB, where it takes 4.1
/// us, and 6.4 us with a flag per row, on two H200s). With more ranks: as many bytes as in an all-reduce.
const FUSED_LOW_LATENCY_BYTES: usize = 512 << 10;

/// Maximum width of a row in [`fused`]: a block normalises it with a thread a vector, next to the threads that push.
const FUSED_WIDTH: usize = (ROW_THREADS - PUSH_THREADS) * 8;

/// Algorithm of the kernel that fuses an all-reduce of `[rows, hidden]` bf16 with the norm after it, on GPUs that run
/// `blocks` blocks of it at once. `None` if there is none: for rows that blocks cannot hold, and where an all-reduce
/// with two hops sends fewer bytes.
pub fn fused(ranks: usize, (rows, hidden): (usize, usize), blocks: usize) -> Option<Algorithm> {
    if !hidden.is_multiple_of(8) || !(1..=FUSED_WIDTH).contains(&hidden) {
        return None;
    }
    let bytes = rows * hidden * size_of::<bf16>();
    let is_short = bytes <= FUSED_LOW_LATENCY_BYTES && bytes * (ranks - 1) <= 3 * LOW_LATENCY_BYTES;
    match Algorithm::choose(ranks, bytes) {
        // One block, or one cluster, per row.
        _ if is_short && rows <= blocks => Some(Algorithm::LowLatency),
        Algorithm::LowLatency | Algorithm::OneShot => Some(Algorithm::OneShot),
        // Two hops of two ranks would send as many bytes.
        Algorithm::TwoShot => (ranks == 2).then_some(Algorithm::OneShot),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_bytes_take_the_algorithm_that_sends_fewer() {
        use Algorithm::{LowLatency, OneShot, TwoShot};
        let of = |ranks: usize| [16 << 10, 256 << 10, 1 << 20, 16 << 20].map(|bytes| Algorithm::choose(ranks, bytes));
        assert_eq!(of(2), [LowLatency, LowLatency, OneShot, TwoShot]);
        assert_eq!(of(4), [LowLatency, LowLatency, OneShot, TwoShot]);
        assert_eq!(of(8), [LowLatency, OneShot, TwoShot, TwoShot]);
        let sent = |ranks| [LowLatency, OneShot, TwoShot].map(|algorithm| algorithm.sent(ranks, 1024));
        assert_eq!((sent(2), sent(4)), ([2048, 1024, 1024], [6144, 3072, 1536]));
    }

    #[test]
    fn short_messages_are_fused_with_their_norm() {
        use Algorithm::{LowLatency, OneShot};
        let of = |ranks: usize, hidden: usize| [25, 51, 52, 4096].map(|rows| fused(ranks, (rows, hidden), 128));
        assert_eq!(of(2, 5120), [Some(LowLatency), Some(LowLatency), Some(OneShot), Some(OneShot)]);
        assert_eq!(of(4, 5120), [Some(LowLatency), Some(OneShot), Some(OneShot), None]);
        assert_eq!(of(2, 8192), [None; 4], "wider than a block");
        assert_eq!(fused(2, (33, 64), 32), Some(OneShot), "more rows than blocks");
        assert_eq!(fused(2, (1, 60), 128), None, "no whole vectors");
    }
}
