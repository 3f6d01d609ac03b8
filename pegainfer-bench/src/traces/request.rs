//! A request of a trace, and matching token ids.

use pegainfer_core::rng;
use std::time::Duration;

/// A request of a trace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TraceRequest {
    /// Number of the request in the order of arrival, from 0.
    pub number: u64,
    /// Arrival time since the first request's.
    pub at: Duration,
    /// Number of prompt tokens, at least 1.
    pub prompt_len: usize,
    /// Number of generated tokens, at least 1.
    pub output_len: usize,
    /// Hashes of the prompt's blocks, in order: equal hashes stand for equal tokens. Empty if the trace has none.
    /// Tokens after the last block are unique to the request.
    pub blocks: Vec<u64>,
    /// Tokens per block.
    pub block_tokens: usize,
    /// Token ids of the prompt, if recorded.
    pub ids: Option<Vec<u32>>,
    /// Number of the request's session. Requests of a session follow each other.
    pub session: Option<u64>,
    /// Time from the end of the session's previous request to this one.
    pub delay: Option<Duration>,
}

impl TraceRequest {
    /// Token ids of the prompt, below `vocab`. Recorded ids are taken modulo `vocab`, which keeps shared prefixes for
    /// any model. Otherwise ids are random: a block's depend only on `seed` and its hash, so requests share the same
    /// prefixes as in the trace; all others depend on `seed` and the request's number.
    pub fn prompt(&self, vocab: usize, seed: u64) -> Vec<u32> {
        let vocab = vocab.max(1) as u64;
        if let Some(ids) = &self.ids {
            return ids.iter().map(|&id| (u64::from(id) % vocab) as u32).collect();
        }
        let own = rng::bits(!seed, self.number);
        let block_tokens = self.block_tokens.max(1);
        let id = |position: usize| {
            let bits = match self.blocks.get(position / block_tokens) {
                Some(hash) => rng::bits(rng::bits(seed, *hash), (position % block_tokens) as u64),
                None => rng::bits(own, position as u64),
            };
            rng::below(bits, vocab) as u32
        };
        (0..self.prompt_len).map(id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn prompts_share_what_their_hashes_share() {
        let request = |number, prompt_len, blocks: &[u64]| TraceRequest {
            number,
            prompt_len,
            blocks: blocks.to_vec(),
            block_tokens: 16,
            ..TraceRequest::default()
        };
        let a = request(0, 50, &[7, 8, 9]).prompt(1000, 1);
        let b = request(1, 70, &[7, 8, 10, 11, 12]).prompt(1000, 1);
        assert_eq!((a.len(), b.len()), (50, 70));
        assert_eq!(a[..32], b[..32]);
        let differ = |a: &[u32], b: &[u32]| a.iter().zip(b).filter(|(a, b)| a != b).count();
        assert!(differ(&a[32..48], &b[32..48]) > 12, "{a:?} {b:?}");
        // Tokens without a hash differ, and so do tokens of another seed.
        let c = request(2, 50, &[7, 8, 9]).prompt(1000, 1);
        assert!(c[..48] == a[..48] && c[48..] != a[48..]);
        assert!(differ(&request(0, 50, &[7, 8, 9]).prompt(1000, 2), &a) > 45);
        assert_eq!(request(0, 50, &[7, 8, 9]).prompt(1000, 1), a);
        let alone = |number| request(number, 64, &[]).prompt(1000, 1);
        assert!(differ(&alone(0), &alone(1)) > 60);
        let many = request(0, 10_000, &[]).prompt(50, 1);
        assert_eq!(many.iter().copied().collect::<HashSet<u32>>(), (0..50).collect());
    }

    #[test]
    fn recorded_ids_are_kept() {
        let request = TraceRequest { prompt_len: 3, ids: Some(vec![5, 99, 100]), ..TraceRequest::default() };
        assert_eq!(request.prompt(1000, 1), [5, 99, 100]);
        assert_eq!(request.prompt(100, 1), [5, 99, 0]);
    }
}
