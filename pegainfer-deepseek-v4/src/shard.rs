//! The part of the model that a rank holds: columns of the experts, heads by groups of the output projection, rows of
//! the vocabulary. Everything else is replicated.

use crate::config::Config;
use pegainfer_core::parallel::Shard;
use pegainfer_runtime::padded_vocab;
use std::ops::Range;

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

/// Checks that `ranks` ranks can share the model; the error says why not.
pub(crate) fn check(config: &Config, ranks: usize) -> Result<(), String> {
    let Config { experts, vocab_size, .. } = config;
    match ranks > 0 && experts.is_multiple_of(ranks) && *vocab_size == padded_vocab(*vocab_size, ranks) {
        true => Ok(()),
        false => Err(format!("{ranks} ranks cannot share {experts} experts and a vocabulary of {vocab_size}")),
    }
}

/// The parts of this model that a rank holds.
pub trait RankParts {
    /// Number of ranks that share the heads; a group of the output projection is not split. With more ranks than
    /// groups, the others compute the same heads again.
    fn attention_ranks(self, config: &Config) -> usize;

    /// False if this rank's attention output duplicates another's and must not be added twice.
    fn owns_heads(self, config: &Config) -> bool;

    /// Groups of heads.
    fn groups(self, config: &Config) -> Range<usize>;

    /// Query heads.
    fn heads(self, config: &Config) -> Range<usize>;

    /// Number of ranks that share the columns of an expert: parts are whole blocks of FP8 weights and whole groups of a
    /// rounded activation. With more ranks, each such team has some of the routed experts.
    fn team(self, config: &Config) -> usize;

    /// Routed experts.
    fn experts(self, config: &Config) -> Range<usize>;

    /// Columns of these experts, and of the shared one.
    fn expert_columns(self, config: &Config) -> Range<usize>;

    /// False if this rank's output of the shared expert duplicates another's and must not be added twice.
    fn owns_shared_expert(self, config: &Config) -> bool;

    /// The rank's share of a step of `tokens` tokens.
    fn tokens(self, tokens: usize) -> OwnTokens;

    /// Rows of embedding and output matrix.
    fn vocab(self, config: &Config) -> Range<usize>;
}

impl RankParts for Shard {
    fn attention_ranks(self, config: &Config) -> usize {
        (1..=self.ranks)
            .rev()
            .find(|n| self.ranks.is_multiple_of(*n) && config.o_groups.is_multiple_of(*n))
            .unwrap_or(1)
    }

    fn owns_heads(self, config: &Config) -> bool {
        self.rank < self.attention_ranks(config)
    }

    fn groups(self, config: &Config) -> Range<usize> {
        let ranks = self.attention_ranks(config);
        Shard { rank: self.rank % ranks, ranks }.part(config.o_groups)
    }

    fn heads(self, config: &Config) -> Range<usize> {
        let (groups, each) = (self.groups(config), config.heads_per_group());
        groups.start * each..groups.end * each
    }

    fn team(self, config: &Config) -> usize {
        let whole = |n: usize| (config.expert_width / n).is_multiple_of(BLOCK) && config.expert_width.is_multiple_of(n);
        (1..=self.ranks).rev().find(|n| self.ranks.is_multiple_of(*n) && (*n == 1 || whole(*n))).unwrap_or(1)
    }

    fn experts(self, config: &Config) -> Range<usize> {
        let team = self.team(config);
        Shard { rank: self.rank / team, ranks: self.ranks / team }.part(config.experts)
    }

    fn expert_columns(self, config: &Config) -> Range<usize> {
        let team = self.team(config);
        Shard { rank: self.rank % team, ranks: team }.part(config.expert_width)
    }

    fn owns_shared_expert(self, config: &Config) -> bool {
        self.rank < self.team(config)
    }

    fn tokens(self, tokens: usize) -> OwnTokens {
        let each = tokens.div_ceil(self.ranks);
        let own = (self.rank * each).min(tokens)..((self.rank + 1) * each).min(tokens);
        OwnTokens { own, rows: each * self.ranks }
    }

    fn vocab(self, config: &Config) -> Range<usize> {
        self.part(config.vocab_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{flash, tiny};

    #[test]
    fn every_part_is_held_once() {
        let config = flash(false);
        for ranks in [1, 2, 4, 8] {
            let shards = Shard::all(ranks).collect::<Vec<_>>();
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
        assert!((1..=8).filter(|ranks| check(&config, *ranks).is_ok()).eq([1, 2, 4, 8]));
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
        let shards = Shard::all(4).collect::<Vec<_>>();
        let parts: Vec<_> = shards.iter().map(|s| (s.experts(&config), s.expert_columns(&config))).collect();
        assert_eq!(parts, [(0..128, 0..128), (0..128, 128..256), (128..256, 0..128), (128..256, 128..256)]);
        let owners: Vec<bool> = shards.iter().map(|s| s.owns_shared_expert(&config)).collect();
        assert_eq!(owners, [true, true, false, false]);
    }

    #[test]
    fn more_ranks_than_groups_repeat_heads_and_add_them_once() {
        let config = Config::parse(&tiny().to_string()).unwrap();
        let shards = Shard::all(4).collect::<Vec<_>>();
        let owners: Vec<bool> = shards.iter().map(|s| s.owns_heads(&config)).collect();
        assert_eq!(owners, [true, true, false, false]);
        assert_eq!((shards[0].heads(&config), shards[3].heads(&config)), (0..4, 4..8));
    }
}
