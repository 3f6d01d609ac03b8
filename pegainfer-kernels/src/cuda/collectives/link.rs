//! One rank's view of the memory that GPUs exchange through.

use super::VECTOR;
use super::algorithm::Algorithm;
use crate::limits::collectives::{HEADER_BYTES, LL_THREADS, MAILBOX_BYTES, MAX_BLOCKS, MAX_RANKS, THREADS};

/// One rank's view of the arenas of all ranks.
#[derive(Debug, Clone, Copy)]
pub struct Link {
    pub(super) rank: usize,
    pub(super) ranks: usize,
    /// Address of its own arena.
    pub(super) arena: u64,
    /// Addresses of its mailbox in the arena of each rank.
    pub(super) to: [u64; MAX_RANKS],
    pub(super) stage_bytes: usize,
    /// Address of the status words.
    pub(super) status: u64,
    /// Timeout of a wait, in nanoseconds.
    pub(super) timeout: u64,
    /// Maximum number of blocks of a launch, a power of two.
    pub(super) blocks: usize,
    /// True if a launch may have clusters.
    pub(super) clusters: bool,
    /// True if its messages come back to it.
    pub(super) alone: bool,
}

/// Staging bytes of all mailboxes of one half together: with two ranks, 4,096 rows of 5,120 elements of bf16. A peer's
/// share is the maximum that one launch sends to a peer.
const STAGE_BYTES: usize = 40 << 20;

fn stage_bytes(ranks: usize) -> usize {
    (STAGE_BYTES / (ranks - 1)) & !511
}

/// Offset of the `i`-th mailbox of an arena.
fn mailbox(i: usize, ranks: usize) -> u64 {
    (HEADER_BYTES + i * (MAILBOX_BYTES + 2 * stage_bytes(ranks))) as u64
}

/// Offset of the mailbox of rank `source` in the arena of rank `owner`, which has none for itself.
fn mailbox_of(source: usize, owner: usize, ranks: usize) -> u64 {
    mailbox(source - usize::from(source > owner), ranks)
}

/// Multiprocessors and clusters that all ranks' GPUs have: every rank has the same grid.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    /// The fewest multiprocessors of any GPU.
    pub multiprocessors: usize,
    /// True if all have thread block clusters.
    pub clusters: bool,
}

impl Link {
    /// Bytes of an arena, zero at first.
    pub fn arena_bytes(ranks: usize) -> usize {
        mailbox(ranks - 1, ranks) as usize
    }

    /// The view of `rank`.
    pub fn new(rank: usize, arenas: &[u64], status: u64, timeout: u64, grid: Grid) -> Self {
        let ranks = arenas.len();
        assert!((2..=MAX_RANKS).contains(&ranks), "{ranks} ranks");
        let mut to = [0; MAX_RANKS];
        let peers = to.iter_mut().zip(arenas).enumerate().filter(|(peer, _)| *peer != rank);
        peers.for_each(|(peer, (to, arena))| *to = arena + mailbox_of(rank, peer, ranks));
        let blocks = (1 << grid.multiprocessors.max(1).ilog2()).min(MAX_BLOCKS);
        Self {
            rank,
            ranks,
            arena: arenas[rank],
            to,
            stage_bytes: stage_bytes(ranks),
            status,
            timeout,
            blocks,
            clusters: grid.clusters,
            alone: false,
        }
    }

    /// View of a single rank of several: messages to a peer come back as the peer's.
    pub fn loop_back((rank, ranks): (usize, usize), arena: u64, status: u64, timeout: u64, grid: Grid) -> Self {
        let mut link = Self::new(rank, &vec![arena; ranks], status, timeout, grid);
        let peers = link.to.iter_mut().take(ranks).enumerate().filter(|(peer, _)| *peer != rank);
        peers.for_each(|(peer, to)| *to = arena + mailbox_of(peer, rank, ranks));
        Self { alone: true, ..link }
    }

    /// Index of the kernel for two, four or eight ranks.
    pub(super) fn variant(&self) -> usize {
        self.ranks.next_power_of_two().ilog2() as usize - 1
    }

    /// Maximum number of vectors of one launch.
    pub(super) fn capacity(&self, algorithm: Algorithm) -> usize {
        match algorithm {
            Algorithm::LowLatency => self.blocks * LL_THREADS / 2,
            Algorithm::OneShot => self.stage_bytes / VECTOR,
            Algorithm::TwoShot => self.ranks * (self.stage_bytes / 2 / VECTOR),
        }
    }

    /// Blocks and threads of a launch, the same on every rank.
    pub(super) fn grid(&self, algorithm: Algorithm, vectors: usize) -> ([usize; 3], usize) {
        let (blocks, threads) = match algorithm {
            Algorithm::LowLatency => ((2 * vectors).div_ceil(LL_THREADS).next_power_of_two(), LL_THREADS),
            Algorithm::OneShot | Algorithm::TwoShot => (1 << (vectors / THREADS).max(1).ilog2(), THREADS),
        };
        ([blocks.min(self.blocks), 1, 1], threads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(multiprocessors: usize) -> Grid {
        Grid { multiprocessors, clusters: true }
    }

    #[test]
    fn arenas_hold_every_message_and_mailboxes_do_not_overlap() {
        for ranks in 2..=MAX_RANKS {
            let arenas: Vec<u64> = (0..ranks).map(|rank| (rank as u64) << 40).collect();
            let links: Vec<Link> = (0..ranks).map(|rank| Link::new(rank, &arenas, 0, 1, grid(132))).collect();
            let stage = links[0].stage_bytes;
            assert_eq!((links[0].blocks, stage % 512), (128, 0));
            for (peer, arena) in arenas.iter().enumerate() {
                let others = links.iter().filter(|link| link.rank != peer);
                let starts: Vec<u64> = others.map(|link| link.to[peer] - arena).collect();
                assert_eq!(starts[0], HEADER_BYTES as u64);
                assert!(starts.windows(2).all(|w| w[1] - w[0] == (MAILBOX_BYTES + 2 * stage) as u64));
                assert!(starts.iter().all(|start| start.is_multiple_of(VECTOR as u64)));
                let end = starts[ranks - 2] as usize + MAILBOX_BYTES + 2 * stage;
                assert_eq!(end, Link::arena_bytes(ranks));
                // Alone, what it sends to a peer is in the mailbox of that peer.
                let alone = Link::loop_back((peer, ranks), *arena, 0, 1, grid(132));
                let own = (0..ranks).filter(|rank| *rank != peer).map(|rank| alone.to[rank] - arena);
                assert!(own.eq(starts));
            }
            let part = links[0].capacity(Algorithm::TwoShot).div_ceil(ranks);
            assert!(part * VECTOR <= stage / 2 && links[0].capacity(Algorithm::OneShot) * VECTOR <= stage);
        }
    }

    #[test]
    fn grids_are_powers_of_two_that_are_resident_and_cover_the_message() {
        for (multiprocessors, most) in [(132, 128), (58, 32), (128, 128), (200, 128)] {
            let link = Link::new(0, &[0, 1 << 40], 0, 1, grid(multiprocessors));
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
}
