//! Counts the tokens of sequences, for penalties.

use super::check::Check;
use crate::packed_counts::{UPDATE_WORDS, count_words};
use crate::{cpu, cuda};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Adds the tokens of each update to the counts of its slot; the update may first reset them to zero.
///
/// `counts`: `[slots, count_words(vocab)]`, a 16-bit `TokenCount` per token; `updates`: `[n, UPDATE_WORDS]`, of
/// different slots, and `tokens`: `[m]`, in the layout of [`PackedCountUpdates`](super::PackedCountUpdates); `sampled`:
/// `[samples]`, the tokens that placeholders stand for; all u32. Does not wait for a GPU. An error on the CPU if a
/// slot, a span or a token is out of range.
pub fn count_tokens(
    exec: &mut Exec,
    counts: &mut Tensor,
    updates: &Tensor,
    tokens: &Tensor,
    sampled: &Tensor,
    vocab: usize,
) -> Result<(), OpError> {
    let check = Check("count_tokens");
    let ((slots, words), n, (m, samples)) =
        (counts.rows_cols(), updates.rows_cols().0, (tokens.elements(), sampled.elements()));
    check.is(counts, DType::U32, &[slots, count_words(vocab)])?;
    check.is(updates, DType::U32, &[n, UPDATE_WORDS])?;
    check.is(tokens, DType::U32, &[m])?;
    check.is(sampled, DType::U32, &[samples])?;
    exec.record(|device| {
        let kernel = if device == Device::Cuda { "count_tokens" } else { "rows" };
        // A token's count is read and written; the initial counts of a slot are written once per request.
        let bytes = updates.bytes() + tokens.bytes() + 8 * m as u64;
        let reads = [&*counts, updates, tokens, sampled];
        OpRecord::new("count_tokens", kernel, &reads, &[&*counts], m as u64).with_bytes(bytes)
    });
    match exec.device() {
        Device::Cpu(_) => {
            let within = |&[slot, _, first, end_of_prompt, end]: &[u32; UPDATE_WORDS]| {
                (slot as usize) < slots && first <= end_of_prompt && end_of_prompt <= end && end as usize <= m
            };
            let (updates, tokens, sampled) = (updates.host::<u32>(), tokens.host::<u32>(), sampled.host::<u32>());
            check.that(updates.as_chunks().0.iter().all(within), "an update is out of range")?;
            let known = |token: &u32| cpu::penalties::resolved(*token, sampled).is_some_and(|t| (t as usize) < vocab);
            check.that(tokens.iter().all(known), "a token is not in the vocabulary")?;
            cpu::penalties::count_tokens(counts.host_mut(), words, updates, tokens, sampled);
        }
        Device::Cuda => cuda::count_tokens(exec, counts, updates, tokens, sampled, vocab)?,
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed_counts::PackedCountUpdates;
    use crate::testing::Host;
    use pegainfer_core::logits_processors::{CountUpdate, TokenCount};
    use pegainfer_core::schedule::PLACEHOLDER;

    const VOCAB: usize = 21;

    fn upload(host: &mut Host, name: &str, words: &[u32], shape: &[usize]) -> Tensor {
        let mut tensor = host.zeros(name, shape, DType::U32);
        tensor.host_mut::<u32>().copy_from_slice(words);
        tensor
    }

    fn run(host: &mut Host, counts: &mut Tensor, updates: &[CountUpdate]) -> Result<(), OpError> {
        let packed = PackedCountUpdates::new(updates);
        let sampled = upload(host, "sampled", &[7, 20], &[2]);
        let tokens = upload(host, "tokens", &packed.tokens, &[packed.tokens.len()]);
        let updates = upload(host, "updates", &packed.updates, &[updates.len(), UPDATE_WORDS]);
        count_tokens(&mut host.exec, counts, &updates, &tokens, &sampled, VOCAB)
    }

    fn counts_of(counts: &Tensor, slot: usize) -> Vec<(usize, TokenCount)> {
        let words = &counts.host::<u32>()[slot * count_words(VOCAB)..][..count_words(VOCAB)];
        let halves = words.iter().flat_map(|word| [*word as u16, (word >> 16) as u16]);
        halves.enumerate().filter(|(_, bits)| *bits != 0).map(|(i, bits)| (i, TokenCount::from_bits(bits))).collect()
    }

    #[test]
    fn counts_follow_each_sequence() {
        Host::each(|mut host| {
            let mut counts = host.zeros("counts", &[3, count_words(VOCAB)], DType::U32);
            counts.host_mut::<u32>().fill(0x0003_8004);
            let update = |slot, starts, prompt: &[u32], generated: &[u32]| CountUpdate {
                slot,
                starts,
                prompt: prompt.into(),
                generated: generated.to_vec(),
            };
            let first = [update(2, true, &[5, 4, 5], &[4, 20, 4]), update(0, true, &[], &[])];
            run(&mut host, &mut counts, &first).unwrap();
            run(&mut host, &mut counts, &[update(2, false, &[], &[PLACEHOLDER | 1, 0, PLACEHOLDER])]).unwrap();
            let count = TokenCount::default();
            let expected = [
                (0, count.plus(1)),
                (4, count.with_prompt().plus(2)),
                (5, count.with_prompt()),
                (7, count.plus(1)),
                (20, count.plus(2)),
            ];
            assert_eq!(counts_of(&counts, 2), expected);
            assert_eq!(counts_of(&counts, 0), []);
            assert_eq!(counts_of(&counts, 1)[0], (0, count.with_prompt().plus(4)), "another slot is as it was");
            run(&mut host, &mut counts, &[update(1, false, &[], &vec![0; 40_000])]).unwrap();
            assert_eq!(counts_of(&counts, 1)[0].1.generated(), TokenCount::MAX);
        });
    }

    #[test]
    fn what_is_out_of_range_is_refused() {
        Host::each(|mut host| {
            let mut counts = host.zeros("counts", &[1, count_words(VOCAB)], DType::U32);
            for (slot, token, message) in [
                (1, 0, "an update is out of range"),
                (0, VOCAB as u32, "a token is not in the vocabulary"),
                (0, PLACEHOLDER | 2, "a token is not in the vocabulary"),
            ] {
                let update = CountUpdate { slot, starts: false, prompt: [].into(), generated: vec![token] };
                assert_eq!(run(&mut host, &mut counts, &[update]).unwrap_err().message, message);
            }
        });
    }
}
