//! The number of a rank, and its share of what the ranks divide.

use std::ops::Range;

/// One rank of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// Number of the rank, from 0.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
}

impl Shard {
    /// The only rank, which holds the whole model.
    pub const WHOLE: Self = Self { rank: 0, ranks: 1 };

    /// The shards of `ranks` ranks, in order.
    pub fn all(ranks: usize) -> impl Iterator<Item = Self> {
        (0..ranks).map(move |rank| Self { rank, ranks })
    }

    /// The rank's share of `n`, which is a multiple of the number of ranks.
    pub fn part(self, n: usize) -> Range<usize> {
        let each = n / self.ranks;
        self.rank * each..(self.rank + 1) * each
    }

    /// The rank's share of `n` items that are either divided, or each held by `ranks / n` consecutive ranks: then one
    /// item.
    pub fn part_or_copy(self, n: usize) -> Range<usize> {
        match n < self.ranks {
            true => self.rank * n / self.ranks..self.rank * n / self.ranks + 1,
            false => self.part(n),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_everything_once_and_copies_are_of_consecutive_ranks() {
        let parts = |n: usize| Shard::all(4).map(|shard| shard.part(n)).collect::<Vec<_>>();
        assert_eq!(parts(8), [0..2, 2..4, 4..6, 6..8]);
        let copies = |n: usize| Shard::all(4).map(|shard| shard.part_or_copy(n)).collect::<Vec<_>>();
        assert_eq!(copies(2), [0..1, 0..1, 1..2, 1..2]);
        assert_eq!((copies(1), copies(4)), (vec![0..1; 4], parts(4)));
        assert_eq!(Shard::WHOLE.part(7), 0..7);
    }
}
