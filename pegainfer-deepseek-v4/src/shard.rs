//! The part of the model that a rank holds: columns of the experts, heads by groups of the output projection, rows of
//! the vocabulary. Everything else is replicated.

use crate::config::Config;
use std::ops::Range;

/// Most ranks that are suggested: GPUs of one machine.
pub const MAX_RANKS: usize = 8;
/// Edge of a block of FP8 weights, and values of a rounded activation that share a scale.
const BLOCK: usize = 128;

/// The tokens of a step whose residual streams a rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnTokens {
    /// The rank's tokens among those of the step.
    pub own: Range<usize>,
    /// Rows of a tensor of which every rank has an equal share; the last ones may belong to no token.
    pub rows: usize,
}

/// One rank of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// Number of the rank, from 0.
    pub rank: usize,
    /// Ranks in all.
    pub ranks: usize,
}

impl Shard {
    /// The whole model.
    pub const WHOLE: Self = Self { rank: 0, ranks: 1 };

    /// The shards of `ranks` ranks; the reason if the model cannot be split into that many.
    pub fn all(config: &Config, ranks: usize) -> Result<Vec<Self>, String> {
        if ranks == 0 || !config.experts.is_multiple_of(ranks) || !config.vocab_size.is_multiple_of(ranks) {
            let divides = |n: &usize| config.experts.is_multiple_of(*n) && config.vocab_size.is_multiple_of(*n);
            let possible: Vec<String> = (1..=MAX_RANKS).filter(divides).map(|n| n.to_string()).collect();
            return Err(format!(
                "{ranks} ranks cannot share {} experts and a vocabulary of {}: --tensor-parallel-size takes {} here",
                config.experts,
                config.vocab_size,
                possible.join(", ")
            ));
        }
        Ok((0..ranks).map(|rank| Self { rank, ranks }).collect())
    }

    /// Number of ranks that share the heads; a group of the output projection is not split. With more ranks than
    /// groups, the others compute the same heads again.
    pub fn attention_ranks(self, config: &Config) -> usize {
        (1..=self.ranks)
            .rev()
            .find(|n| self.ranks.is_multiple_of(*n) && config.o_groups.is_multiple_of(*n))
            .unwrap_or(1)
    }

    /// False if this rank's attention output duplicates another's and must not be added twice.
    pub fn owns_heads(self, config: &Config) -> bool {
        self.rank < self.attention_ranks(config)
    }

    /// Groups of heads.
    pub fn groups(self, config: &Config) -> Range<usize> {
        let ranks = self.attention_ranks(config);
        part(config.o_groups, self.rank % ranks, ranks)
    }

    /// Query heads.
    pub fn heads(self, config: &Config) -> Range<usize> {
        let (groups, each) = (self.groups(config), config.heads_per_group());
        groups.start * each..groups.end * each
    }

    /// Number of ranks that share the columns of an expert: parts are whole blocks of FP8 weights and whole groups of a
    /// rounded activation. With more ranks, each such team has some of the routed experts.
    pub fn team(self, config: &Config) -> usize {
        let whole = |n: usize| (config.expert_width / n).is_multiple_of(BLOCK) && config.expert_width.is_multiple_of(n);
        (1..=self.ranks).rev().find(|n| self.ranks.is_multiple_of(*n) && (*n == 1 || whole(*n))).unwrap_or(1)
    }

    /// Routed experts.
    pub fn experts(self, config: &Config) -> Range<usize> {
        let team = self.team(config);
        part(config.experts, self.rank / team, self.ranks / team)
    }

    /// Columns of these experts, and of the shared one.
    pub fn expert_columns(self, config: &Config) -> Range<usize> {
        let team = self.team(config);
        part(config.expert_width, self.rank % team, team)
    }

    /// False if this rank's output of the shared expert duplicates another's and must not be added twice.
    pub fn owns_shared_expert(self, config: &Config) -> bool {
        self.rank < self.team(config)
    }

    /// The rank's share of a step of `tokens` tokens.
    pub fn tokens(self, tokens: usize) -> OwnTokens {
        let each = tokens.div_ceil(self.ranks);
        let own = (self.rank * each).min(tokens)..((self.rank + 1) * each).min(tokens);
        OwnTokens { own, rows: each * self.ranks }
    }

    /// Rows of embedding and output matrix.
    pub fn vocab(self, config: &Config) -> Range<usize> {
        part(config.vocab_size, self.rank, self.ranks)
    }
}

fn part(n: usize, rank: usize, ranks: usize) -> Range<usize> {
    rank * n / ranks..(rank + 1) * n / ranks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{flash, tiny};

    #[test]
    fn every_part_is_held_once() {
        let config = flash(false);
        for ranks in [1, 2, 4, 8] {
            let shards = Shard::all(&config, ranks).unwrap();
            for (of, total) in [
                (Shard::expert_columns as fn(Shard, &Config) -> Range<usize>, 2048),
                (Shard::heads, 64),
                (Shard::groups, 8),
                (Shard::vocab, 129_280),
            ] {
                let all: Vec<usize> = shards.iter().flat_map(|s| of(*s, &config)).collect();
                assert_eq!(all, (0..total).collect::<Vec<_>>());
            }
            assert!(shards.iter().all(|s| s.owns_heads(&config) && s.owns_shared_expert(&config)));
            assert!(shards.iter().all(|s| s.experts(&config) == (0..256)));
        }
        assert!(Shard::all(&config, 3).unwrap_err().contains("takes 1, 2, 4, 8 here"));
    }

    #[test]
    fn every_token_has_one_owner() {
        for (ranks, tokens, rows) in [(2, 512, 512), (4, 1022, 1024), (4, 5, 8), (8, 1, 8)] {
            let shares = (0..ranks).map(|rank| Shard { rank, ranks }.tokens(tokens));
            let all: Vec<usize> =
                shares.inspect(|share| assert_eq!(share.rows, rows)).flat_map(|share| share.own).collect();
            assert_eq!(all, (0..tokens).collect::<Vec<_>>());
        }
    }

    /// Experts of 256 columns make two blocks: the four ranks are two teams with half of the experts each.
    #[test]
    fn more_ranks_than_blocks_of_columns_share_experts_by_number() {
        let config = Config { expert_width: 256, ..flash(false) };
        let shards = Shard::all(&config, 4).unwrap();
        let parts: Vec<_> = shards.iter().map(|s| (s.experts(&config), s.expert_columns(&config))).collect();
        assert_eq!(parts, [(0..128, 0..128), (0..128, 128..256), (128..256, 0..128), (128..256, 128..256)]);
        let owners: Vec<bool> = shards.iter().map(|s| s.owns_shared_expert(&config)).collect();
        assert_eq!(owners, [true, true, false, false]);
    }

    #[test]
    fn more_ranks_than_groups_repeat_heads_and_add_them_once() {
        let config = Config::parse(&tiny().to_string()).unwrap();
        let shards = Shard::all(&config, 4).unwrap();
        let owners: Vec<bool> = shards.iter().map(|s| s.owns_heads(&config)).collect();
        assert_eq!(owners, [true, true, false, false]);
        assert_eq!((shards[0].heads(&config), shards[3].heads(&config)), (0..4, 4..8));
    }
}
