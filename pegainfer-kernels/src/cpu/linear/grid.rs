//! Split of one GEMM into parallel tasks. It never changes a result, because a task computes whole outputs.

use pegainfer_core::team;
use std::ops::Range;

/// Tasks per thread: enough that a thread that loses its core for a while does not delay the others.
const TASKS_PER_THREAD: usize = 4;

/// The rows of x split into the fewest groups of at most `max_rows` rows, as even as possible. A group is a tile's
/// height.
#[derive(Clone, Copy)]
pub(super) struct RowGroups {
    m: usize,
    max_rows: usize,
}

impl RowGroups {
    pub(super) fn new(m: usize, max_rows: usize) -> Self {
        Self { m, max_rows }
    }

    /// Number of groups.
    pub(super) fn count(self) -> usize {
        self.m.div_ceil(self.max_rows)
    }

    /// The rows of group `i`.
    pub(super) fn rows(self, i: usize) -> Range<usize> {
        self.m * i / self.count()..self.m * (i + 1) / self.count()
    }
}

/// A grid of blocks over the output: groups of x rows by w rows.
pub(super) struct Grid {
    groups: usize,
    n: usize,
    /// Groups per block, chosen so that their x rows stay in the L2 cache while the block's weights stream past.
    group_block: usize,
    /// Rows of w per block.
    n_block: usize,
}

impl Grid {
    /// A grid of `groups` groups of x rows, `group_bytes` each in the layout of the tiles and at most `max_groups` per
    /// block, by `n` rows of w in blocks of a multiple of `n_tile`.
    pub(super) fn new(groups: usize, group_bytes: usize, max_groups: usize, n: usize, n_tile: usize) -> Self {
        /// About half of the L2 of the server cores of today (1 to 2 MiB); the other half is for w.
        const X_BLOCK_BYTES: usize = 768 << 10;
        let max = (X_BLOCK_BYTES / group_bytes.max(1)).clamp(1, max_groups);
        let group_block = groups.div_ceil(groups.div_ceil(max));
        let group_blocks = groups.div_ceil(group_block);
        let tasks = (TASKS_PER_THREAD * team::threads()).div_ceil(group_blocks);
        let n_block = n.div_ceil(tasks).next_multiple_of(n_tile);
        Self { groups, n, group_block, n_block }
    }

    /// Runs `task(groups of x rows, rows of w)` for every block, in parallel on the current team. Blocks with the same
    /// w rows are adjacent, so that later ones find them in a cache.
    pub(super) fn for_each(&self, task: impl Fn(Range<usize>, Range<usize>) + Sync) {
        let n_blocks = self.n.div_ceil(self.n_block);
        let group_blocks = self.groups.div_ceil(self.group_block);
        team::for_each(group_blocks * n_blocks, |i| {
            let (group, col) = (i % group_blocks * self.group_block, i / group_blocks * self.n_block);
            task(group..(group + self.group_block).min(self.groups), col..(col + self.n_block).min(self.n));
        });
    }
}
