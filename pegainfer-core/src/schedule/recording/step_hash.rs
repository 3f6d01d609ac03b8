//! A hash of a whole step.

use super::super::encoding::EncodePart;
use super::super::step::Step;
use crate::kv::BlockIds;
use crate::rng;
use std::hash::{Hash, Hasher};

/// A hash that is the same in every process, on machines of one byte order.
#[derive(Default)]
struct StableHasher(u64);

impl Hasher for StableHasher {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks();
        words.iter().for_each(|word| self.write_u64(u64::from_ne_bytes(*word)));
        let mut last = [0; size_of::<u64>()];
        last[..rest.len()].copy_from_slice(rest);
        self.write_u64(u64::from_ne_bytes(last));
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = rng::mix((self.0 ^ word).wrapping_add(rng::GOLDEN));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Hash of the inputs of a step: tokens, positions, KV blocks, state slots, sampled tokens.
pub(super) fn step_hash<R: Hash>(step: &Step<R>) -> u64 {
    let (mut hasher, max_blocks) = (StableHasher::default(), step.max_blocks());
    let Step { tokens, positions, slots, qo_indptr, kv_lens, block_tables, .. } = step;
    // Pads every row with 0 to the longest one, as in existing recordings.
    let padded = |blocks: &BlockIds| {
        let padding = std::iter::repeat_n(0, max_blocks - blocks.len());
        blocks.iter().chain(padding).collect::<Vec<u32>>()
    };
    let block_tables: Vec<u32> = block_tables.iter().flat_map(padded).collect();
    [tokens, positions, slots, qo_indptr, kv_lens, &block_tables].hash(&mut hasher);
    step.state.hash(&mut hasher);
    step.adapters.hash(&mut hasher);
    // Recordings without images keep their hashes.
    if !step.rope_positions.is_empty() {
        step.rope_positions.hash(&mut hasher);
        step.images.iter().for_each(|part| (part.first, &part.rows, part.image.hash()).hash(&mut hasher));
    }
    if let Some(EncodePart { image, part, parts }) = &step.encode {
        (image.hash(), part, parts).hash(&mut hasher);
    }
    step.samples.iter().for_each(|sample| (sample.id, sample.token, sample.position).hash(&mut hasher));
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recordings_that_exist_have_the_hashes_of_today() {
        let block_tables = [vec![0, 1, 2], vec![3]].map(BlockIds::from_iter).to_vec();
        let step = Step::<u32> { block_tables, ..Step::ragged(16, &[(3, 40), (1, 9)]) };
        assert_eq!(step_hash(&step), 0x3f02_821a_9aa7_8330);
    }

    #[test]
    fn every_part_of_a_step_counts() {
        let step = || Step::<u32>::uniform(16, 2, 3, 40);
        let changed = |change: fn(&mut Step<u32>)| {
            let mut step = step();
            change(&mut step);
            step_hash(&step)
        };
        let hash = step_hash(&step());
        assert_eq!(hash, changed(|_| {}));
        let changes: [fn(&mut Step<u32>); 8] = [
            |step| step.tokens[1] += 1,
            |step| step.positions[1] += 1,
            |step| step.slots[1] += 1,
            |step| step.kv_lens[1] += 1,
            |step| step.block_tables[1] = [3, 4, 6].into_iter().collect(),
            |step| step.state.push(0),
            |step| step.samples[1].token -= 1,
            |step| step.adapters.rows = vec![0, 1],
        ];
        let mut hashes: Vec<u64> = changes.into_iter().map(changed).chain([hash]).collect();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), changes.len() + 1);
    }
}
