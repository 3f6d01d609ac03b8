//! How one product is cut into parallel tasks. The cut never changes a result: a task computes whole outputs.

use rayon::prelude::*;
use std::ops::Range;

/// Tasks per thread: enough that a thread that loses its core for a while does not hold up the others.
const TASKS_PER_THREAD: usize = 4;

/// A grid of blocks over the `[m, n]` output.
pub(super) struct Grid {
    m: usize,
    n: usize,
    /// Rows of x per block: chosen so that they stay in the L2 cache while the block's weights stream past.
    m_block: usize,
    /// Rows of w per block.
    n_block: usize,
}

impl Grid {
    /// A grid for an `[m, n]` output whose x rows take `x_row_bytes` each in the form that the tiles read.
    /// Blocks are multiples of the tile, `m_tile` x `n_tile`.
    pub(super) fn new(m: usize, n: usize, x_row_bytes: usize, m_tile: usize, n_tile: usize) -> Self {
        /// About half of the L2 of the server cores of today (1 to 2 MiB); the other half is for w.
        const X_BLOCK_BYTES: usize = 768 << 10;
        let most_rows = (X_BLOCK_BYTES / x_row_bytes.max(1)).max(m_tile);
        let m_blocks = m.div_ceil(most_rows);
        let m_block = m.div_ceil(m_blocks).next_multiple_of(m_tile);
        let tasks = (TASKS_PER_THREAD * rayon::current_num_threads()).div_ceil(m.div_ceil(m_block));
        let n_block = n.div_ceil(tasks).next_multiple_of(n_tile);
        Self { m, n, m_block, n_block }
    }

    /// Runs `task(rows of x, rows of w)` for every block, in parallel on the current rayon pool.
    pub(super) fn for_each(&self, task: impl Fn(Range<usize>, Range<usize>) + Sync) {
        let n_blocks = self.n.div_ceil(self.n_block);
        let m_blocks = self.m.div_ceil(self.m_block);
        (0..m_blocks * n_blocks).into_par_iter().with_max_len(1).for_each(|i| {
            let (row, col) = (i / n_blocks * self.m_block, i % n_blocks * self.n_block);
            task(row..(row + self.m_block).min(self.m), col..(col + self.n_block).min(self.n));
        });
    }
}

/// Cuts `range` into the fewest parts of at most `most` elements, as even as they get.
pub(super) fn even_parts(range: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    let (start, len) = (range.start, range.len());
    let parts = len.div_ceil(most);
    (0..parts).map(move |i| start + len * i / parts..start + len * (i + 1) / parts)
}
