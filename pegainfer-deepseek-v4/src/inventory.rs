//! All tensors of a checkpoint with a given configuration: official names, dtypes and shapes, and their split over
//! ranks.

use crate::config::{Config, DSpark, Drafts, LayerKind, STREAMS};
use crate::shard::{RankParts, check};
use pegainfer_core::parallel::Shard;
use pegainfer_core::weights::StoredDtype as Dtype;

/// Split of a tensor over the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Every rank has all of it.
    Whole,
    /// Rows, by heads or groups of heads.
    HeadRows,
    /// Columns, by groups of heads.
    GroupColumns,
    /// Rows, by token ids.
    Vocab,
    /// Columns of the inner dimension, by the ranks that have this expert.
    Expert(usize),
    /// Columns of the shared expert.
    SharedExpert,
    /// No rank has any of it: the engine does not use the tensor.
    Unused,
}

/// One tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Name in the checkpoint.
    pub name: String,
    /// Stored dtype.
    pub dtype: Dtype,
    /// Stored shape; a pair of FP4 values counts once.
    pub shape: Vec<usize>,
    /// Split over the ranks.
    pub split: Split,
    /// True if it belongs to a draft layer.
    pub draft: bool,
}

impl Entry {
    /// Bytes in the checkpoint.
    pub fn bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8) as u64
    }

    /// Bytes that `shard` loads of it; hash tables become u32.
    pub fn loaded_bytes(&self, config: &Config, shard: Shard) -> u64 {
        if self.draft && !config.loads_drafts {
            return 0;
        }
        let bytes = if self.dtype == Dtype::I64 { self.bytes() / 2 } else { self.bytes() };
        match self.split {
            Split::Whole => bytes,
            Split::Unused => 0,
            Split::HeadRows | Split::GroupColumns => bytes / shard.attention_ranks(config) as u64,
            Split::Vocab => bytes / shard.ranks as u64,
            Split::Expert(e) => {
                if shard.experts(config).contains(&e) {
                    bytes / shard.team(config) as u64
                } else {
                    0
                }
            }
            Split::SharedExpert => bytes / shard.team(config) as u64,
        }
    }
}

/// All tensors, in any order.
pub fn inventory(config: &Config) -> Vec<Entry> {
    let mut list = List { config, entries: Vec::new(), draft: false };
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    list.add("embed.weight", Dtype::BF16, &[vocab, hidden], Split::Vocab);
    list.add("head.weight", Dtype::BF16, &[vocab, hidden], Split::Vocab);
    list.add("norm.weight", Dtype::BF16, &[hidden], Split::Whole);
    list.hyper_head("");
    for (i, kind) in config.layers.iter().enumerate() {
        list.block(&format!("layers.{i}."), *kind, i < config.hash_layers);
    }
    list.draft = true;
    list.drafts();
    list.entries
}

/// Bytes of weights on the rank with the most.
pub fn weight_bytes(config: &Config, ranks: usize) -> Result<u64, String> {
    let entries = inventory(config);
    let rank = |shard: Shard| entries.iter().map(|e| e.loaded_bytes(config, shard)).sum();
    check(config, ranks)?;
    Ok(Shard::all(ranks).map(rank).max().unwrap_or(0))
}

struct List<'a> {
    config: &'a Config,
    entries: Vec<Entry>,
    draft: bool,
}

impl List<'_> {
    fn add(&mut self, name: &str, dtype: Dtype, shape: &[usize], split: Split) {
        self.entries.push(Entry { name: name.to_owned(), dtype, shape: shape.to_vec(), split, draft: self.draft });
    }

    fn bf16(&mut self, name: &str, shape: &[usize]) {
        self.add(name, Dtype::BF16, shape, Split::Whole);
    }

    fn f32(&mut self, name: &str, shape: &[usize], split: Split) {
        self.add(name, Dtype::F32, shape, split);
    }

    /// A matrix that quantised checkpoints have in FP8.
    fn fp8(&mut self, name: &str, n: usize, k: usize, split: Split) {
        let (weight, scale) = (format!("{name}.weight"), format!("{name}.scale"));
        if !self.config.quantized {
            return self.add(&weight, Dtype::BF16, &[n, k], split);
        }
        self.add(&weight, Dtype::F8_E4M3, &[n, k], split);
        self.add(&scale, Dtype::F8_E8M0, &[n.div_ceil(128), k.div_ceil(128)], split);
    }

    /// A matrix that quantised checkpoints have in FP4.
    fn fp4(&mut self, name: &str, n: usize, k: usize, split: Split) {
        let (weight, scale) = (format!("{name}.weight"), format!("{name}.scale"));
        if !self.config.quantized {
            return self.add(&weight, Dtype::BF16, &[n, k], split);
        }
        self.add(&weight, Dtype::I8, &[n, k / 2], split);
        self.add(&scale, Dtype::F8_E8M0, &[n, k / 32], split);
    }

    fn hyper_head(&mut self, prefix: &str) {
        self.f32(&format!("{prefix}hc_head_fn"), &[STREAMS, STREAMS * self.config.hidden_size], Split::Whole);
        self.f32(&format!("{prefix}hc_head_base"), &[STREAMS], Split::Whole);
        self.f32(&format!("{prefix}hc_head_scale"), &[1], Split::Whole);
    }

    fn block(&mut self, prefix: &str, kind: LayerKind, hash: bool) {
        let hidden = self.config.hidden_size;
        let mixes = 2 * STREAMS + STREAMS * STREAMS;
        for half in ["attn", "ffn"] {
            self.bf16(&format!("{prefix}{half}_norm.weight"), &[hidden]);
            self.f32(&format!("{prefix}hc_{half}_fn"), &[mixes, STREAMS * hidden], Split::Whole);
            self.f32(&format!("{prefix}hc_{half}_base"), &[mixes], Split::Whole);
            self.f32(&format!("{prefix}hc_{half}_scale"), &[3], Split::Whole);
        }
        self.attention(&format!("{prefix}attn."), kind);
        self.moe(&format!("{prefix}ffn."), hash);
    }

    fn attention(&mut self, prefix: &str, kind: LayerKind) {
        let c = self.config;
        let name = |tail: &str| format!("{prefix}{tail}");
        let z = c.o_groups * c.o_lora_rank;
        self.f32(&name("attn_sink"), &[c.heads], Split::HeadRows);
        self.fp8(&name("wq_a"), c.q_lora_rank, c.hidden_size, Split::Whole);
        self.bf16(&name("q_norm.weight"), &[c.q_lora_rank]);
        self.fp8(&name("wq_b"), c.heads * c.head_dim, c.q_lora_rank, Split::HeadRows);
        self.fp8(&name("wkv"), c.head_dim, c.hidden_size, Split::Whole);
        self.bf16(&name("kv_norm.weight"), &[c.head_dim]);
        self.fp8(&name("wo_a"), z, c.heads_per_group() * c.head_dim, Split::HeadRows);
        self.fp8(&name("wo_b"), c.hidden_size, z, Split::GroupColumns);
        if let Some(ratio) = kind.ratio() {
            self.compressor(&name("compressor."), ratio, c.head_dim);
        }
        if kind == LayerKind::Sparse {
            self.fp8(&name("indexer.wq_b"), c.index_heads * c.index_head_dim, c.q_lora_rank, Split::Whole);
            self.bf16(&name("indexer.weights_proj.weight"), &[c.index_heads, c.hidden_size]);
            self.compressor(&name("indexer.compressor."), 4, c.index_head_dim);
        }
    }

    fn compressor(&mut self, prefix: &str, ratio: usize, dim: usize) {
        let width = if ratio == 4 { 2 * dim } else { dim };
        self.f32(&format!("{prefix}ape"), &[ratio, width], Split::Whole);
        for matrix in ["wkv", "wgate"] {
            self.bf16(&format!("{prefix}{matrix}.weight"), &[width, self.config.hidden_size]);
        }
        self.bf16(&format!("{prefix}norm.weight"), &[dim]);
    }

    fn moe(&mut self, prefix: &str, hash: bool) {
        let c = self.config;
        self.bf16(&format!("{prefix}gate.weight"), &[c.experts, c.hidden_size]);
        if hash {
            let table = [c.vocab_size, c.experts_per_token];
            self.add(&format!("{prefix}gate.tid2eid"), Dtype::I64, &table, Split::Whole);
        } else {
            self.f32(&format!("{prefix}gate.bias"), &[c.experts], Split::Whole);
        }
        for (w, n, k) in [
            ("w1", c.expert_width, c.hidden_size),
            ("w2", c.hidden_size, c.expert_width),
            ("w3", c.expert_width, c.hidden_size),
        ] {
            for e in 0..c.experts {
                self.fp4(&format!("{prefix}experts.{e}.{w}"), n, k, Split::Expert(e));
            }
            self.fp8(&format!("{prefix}shared_experts.{w}"), n, k, Split::SharedExpert);
        }
    }

    fn drafts(&mut self) {
        let hidden = self.config.hidden_size;
        match &self.config.drafts {
            Drafts::None => {}
            Drafts::Mtp { layers } => {
                for i in 0..*layers {
                    let prefix = format!("mtp.{i}.");
                    self.block(&prefix, LayerKind::Window, false);
                    self.fp8(&format!("{prefix}e_proj"), hidden, hidden, Split::Whole);
                    self.fp8(&format!("{prefix}h_proj"), hidden, hidden, Split::Whole);
                    for norm in ["enorm", "hnorm", "norm"] {
                        self.bf16(&format!("{prefix}{norm}.weight"), &[hidden]);
                    }
                    self.hyper_head(&prefix);
                }
            }
            Drafts::DSpark(dspark) => self.dspark(dspark),
        }
    }

    fn dspark(&mut self, DSpark { layers, targets, markov_rank, .. }: &DSpark) {
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        (0..*layers).for_each(|i| self.block(&format!("mtp.{i}."), LayerKind::Window, false));
        self.fp8("mtp.0.main_proj", hidden, targets.len() * hidden, Split::Whole);
        self.bf16("mtp.0.main_norm.weight", &[hidden]);
        let last = format!("mtp.{}.", layers.saturating_sub(1));
        self.bf16(&format!("{last}norm.weight"), &[hidden]);
        self.hyper_head(&last);
        for w in ["markov_w1", "markov_w2"] {
            self.bf16(&format!("{last}markov_head.{w}.weight"), &[vocab, *markov_rank]);
        }
        let confidence = format!("{last}confidence_head.proj.weight");
        self.add(&confidence, Dtype::BF16, &[1, hidden + markov_rank], Split::Unused);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::flash;

    #[test]
    fn the_april_checkpoint_is_counted_to_the_byte() {
        let entries = inventory(&flash(false));
        assert_eq!(entries.len(), 69_187);
        assert_eq!(entries.iter().map(Entry::bytes).sum::<u64>(), 159_609_485_896);
        for (dtype, count) in [
            (Dtype::BF16, 433),
            (Dtype::F32, 417),
            (Dtype::F8_E4M3, 375),
            (Dtype::F8_E8M0, 34_167),
            (Dtype::I64, 3),
            (Dtype::I8, 33_792),
        ] {
            assert_eq!(entries.iter().filter(|e| e.dtype == dtype).count(), count, "{dtype:?}");
        }
        let drafts: u64 = entries.iter().filter(|e| e.draft).map(Entry::bytes).sum();
        assert_eq!(drafts / 1_000_000, 3_593, "MTP takes 3.59 GB, the backbone 156.016 GB");
    }

    #[test]
    fn the_0731_checkpoint_differs_in_its_drafts_alone() {
        let (april, july) = (inventory(&flash(false)), inventory(&flash(true)));
        assert_eq!(july.iter().map(Entry::bytes).sum::<u64>(), 166_878_536_440);
        let backbone = |list: &[Entry]| list.iter().filter(|e| !e.draft).cloned().collect::<Vec<_>>();
        assert_eq!(backbone(&april), backbone(&july));
        let config = Config { loads_drafts: true, ..flash(true) };
        let loaded: u64 = july.iter().filter(|e| e.draft).map(|e| e.loaded_bytes(&config, Shard::WHOLE)).sum();
        let all: u64 = july.iter().filter(|e| e.draft).map(Entry::bytes).sum();
        assert_eq!(all - loaded, 2 * (4096 + 256), "the confidence head is not loaded");
    }

    #[test]
    fn memory_of_a_rank() {
        let config = flash(false);
        let gb: Vec<u64> = [1, 2, 4, 8].map(|ranks| weight_bytes(&config, ranks).unwrap() / 100_000_000).to_vec();
        // 156.0 GB alone; replicated tensors make eight ranks take more than an eighth each.
        assert_eq!(gb, [1560, 786, 399, 206]);
    }
}
