//! The ragged batch of a step as the reference kernels read it, and rings of recent tokens.

use pegainfer_core::kv::NO_SLOT;

/// Tokens of one page of compressed entries: the least common multiple of the compression ratios.
pub const PAGE_TOKENS: usize = 128;

/// Location of the row of one token of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Among the tokens of this step.
    Fresh(usize),
    /// Among the rows of all rings.
    Ring(usize),
}

/// See `ops::deepseek_v4::RaggedBatch`.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// `[B + 1]`.
    pub indptr: &'a [u32],
    /// `[T]`.
    pub positions: &'a [u32],
    /// `[B]`.
    pub slots: &'a [u32],
    /// `[B, pages]`.
    pub tables: &'a [u32],
    /// Row stride of `tables`.
    pub pages: usize,
}

impl Rows<'_> {
    /// Number and tokens of each row that does not pad the step.
    pub fn iter(&self) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> + '_ {
        let rows = self.indptr.windows(2).enumerate().filter(|(b, _)| self.slots[*b] != NO_SLOT);
        rows.map(|(b, pair)| (b, pair[0] as usize..pair[1] as usize))
    }

    /// Row of every token; `None` for those of rows that pad the step.
    pub fn rows_of_tokens(&self) -> Vec<Option<usize>> {
        let mut rows = vec![None; self.positions.len()];
        self.iter().for_each(|(b, tokens)| rows[tokens].fill(Some(b)));
        rows
    }

    /// Location of the row of sequence `b` at `position`: in this step from its first token on, before that in its ring
    /// of the last `ring` tokens.
    pub fn source(&self, b: usize, position: usize, ring: usize) -> Source {
        let token = self.indptr[b] as usize;
        let first = self.positions[token] as usize;
        match position.checked_sub(first) {
            Some(later) => Source::Fresh(token + later),
            None => Source::Ring(self.slots[b] as usize * ring + position % ring),
        }
    }

    /// Index of compressed entry `i` of row `b` in a cache of `per_page` entries a page.
    pub fn entry(&self, b: usize, i: usize, per_page: usize) -> usize {
        self.tables[b * self.pages + i / per_page] as usize * per_page + i % per_page
    }
}

/// Puts the newest tokens of every row into its ring: that of position `p` at `p % ring`. `fresh`: `[T, width]`;
/// `rings`: `[slots, ring, width]`.
pub fn write_ring<T: Copy>(rows: Rows<'_>, fresh: &[T], rings: &mut [T], ring: usize, width: usize) {
    for (b, tokens) in rows.iter() {
        for t in tokens.clone().skip(tokens.len().saturating_sub(ring)) {
            let at = rows.slots[b] as usize * ring + rows.positions[t] as usize % ring;
            rings[at * width..][..width].copy_from_slice(&fresh[t * width..][..width]);
        }
    }
}
