//! Applies the penalties of requests to rows of logits.

use super::check::Check;
use crate::packed_counts::{NO_PENALTIES, PENALTY_WORDS};
use crate::{cpu, cuda};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Changes logits in place by `Penalties::apply`, in f32 with every operation rounded, so devices agree bit by bit. A
/// row's drafts count as generated in addition to the counts of its slot. Sources: presence and frequency penalties of
/// OpenAI's API, repetition penalty of CTRL (Keskar et al., 2019).
///
/// `logits`: `[rows, vocab]` f32; `counts`: `[slots, count_words(vocab)]` of [`count_tokens`](super::count_tokens());
/// `penalties`: `[rows, PENALTY_WORDS]` and `drafts`: `[n]`, in the layout of
/// [`PackedPenalties`](super::PackedPenalties); all u32. Does not wait for a GPU. An error on the CPU if a slot or a
/// span is out of range.
pub fn penalize(
    exec: &mut Exec,
    logits: &mut Tensor,
    counts: &Tensor,
    penalties: &Tensor,
    drafts: &Tensor,
) -> Result<(), OpError> {
    let check = Check("penalize");
    let ((rows, vocab), (slots, words), n) = (logits.rows_cols(), counts.rows_cols(), drafts.elements());
    check.is(logits, DType::F32, &[rows, vocab])?;
    check.is(counts, DType::U32, &[slots, crate::packed_counts::count_words(vocab)])?;
    check.is(penalties, DType::U32, &[rows, PENALTY_WORDS])?;
    check.is(drafts, DType::U32, &[n])?;
    exec.record(|device| {
        let kernel = if device == Device::Cuda { "penalize" } else { "rows" };
        // The counts of each row; few logits change.
        let bytes = penalties.bytes() + drafts.bytes() + (4 * rows * words) as u64;
        let reads = [&*logits, counts, penalties, drafts];
        OpRecord::new("penalize", kernel, &reads, &[&*logits], (rows * vocab) as u64).with_bytes(bytes)
    });
    match exec.device() {
        Device::Cpu(_) => {
            let within = |&[slot, first, end, ..]: &[u32; PENALTY_WORDS]| {
                (slot == NO_PENALTIES || (slot as usize) < slots) && first <= end && end as usize <= n
            };
            let penalties = penalties.host::<u32>();
            check.that(penalties.as_chunks().0.iter().all(within), "a row's penalties are out of range")?;
            cpu::penalties::penalize(logits.host_mut(), vocab, (counts.host(), words), penalties, drafts.host());
        }
        Device::Cuda => cuda::penalize(exec, logits, counts, penalties, drafts)?,
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed_counts::{PackedPenalties, count_words};
    use crate::testing::Host;
    use pegainfer_core::logits_processors::{CountedPenalties, Penalties, TokenCount};
    use pegainfer_core::rng;

    fn logit(i: usize) -> f32 {
        (rng::bits(7, i as u64) >> 40) as f32 / (1 << 20) as f32 - 8.0
    }

    /// The count of a token in a slot.
    fn count(slot: usize, token: usize) -> TokenCount {
        let count = TokenCount::default().plus((token + slot) * 7 % 5);
        if token.is_multiple_of(3) { count.with_prompt() } else { count }
    }

    fn rows(vocab: usize) -> Vec<Option<CountedPenalties>> {
        let penalties = Penalties { presence: 0.3, frequency: 0.1, repetition: 1.3 };
        let negative = Penalties { presence: -1.1, frequency: -0.7, repetition: 0.9 };
        let drafts = vec![0, (vocab - 1) as u32, 0];
        vec![
            Some(CountedPenalties { penalties, slot: 1, drafts: vec![] }),
            None,
            Some(CountedPenalties { penalties: negative, slot: 0, drafts: drafts.clone() }),
            Some(CountedPenalties { penalties, slot: 1, drafts }),
        ]
    }

    fn upload(host: &mut Host, name: &str, words: &[u32], shape: &[usize]) -> Tensor {
        let mut tensor = host.zeros(name, shape, DType::U32);
        tensor.host_mut::<u32>().copy_from_slice(words);
        tensor
    }

    #[test]
    fn every_row_has_its_own_penalties() {
        for vocab in [1, 33, 64, 1001] {
            Host::each(|mut host| {
                let rows = rows(vocab);
                let mut expected: Vec<f32> = (0..rows.len() * vocab).map(logit).collect();
                let mut logits = host.zeros("logits", &[rows.len(), vocab], DType::F32);
                logits.host_mut::<f32>().copy_from_slice(&expected);
                for (i, logit) in expected.iter_mut().enumerate() {
                    let Some(CountedPenalties { penalties, slot, drafts }) = &rows[i / vocab] else { continue };
                    let drafted = drafts.iter().filter(|draft| **draft as usize == i % vocab).count();
                    *logit = penalties.apply(count(*slot as usize, i % vocab).plus(drafted), *logit);
                }
                let mut counts = host.zeros("counts", &[2, count_words(vocab)], DType::U32);
                for (slot, words) in counts.host_mut::<u32>().chunks_mut(count_words(vocab)).enumerate() {
                    for token in 0..vocab {
                        words[token / 2] |= u32::from(count(slot, token).bits()) << (token % 2 * 16);
                    }
                }
                let packed = PackedPenalties::new(rows.iter().map(Option::as_ref));
                let penalties = upload(&mut host, "penalties", &packed.rows, &[rows.len(), PENALTY_WORDS]);
                let drafts = upload(&mut host, "drafts", &packed.drafts, &[packed.drafts.len()]);
                penalize(&mut host.exec, &mut logits, &counts, &penalties, &drafts).unwrap();
                assert_eq!(logits.host::<f32>(), expected);
            });
        }
    }

    #[test]
    fn what_is_out_of_range_is_refused() {
        Host::each(|mut host| {
            let mut logits = host.zeros("logits", &[1, 40], DType::F32);
            let counts = host.zeros("counts", &[1, count_words(40)], DType::U32);
            let drafts = host.zeros("drafts", &[1], DType::U32);
            for row in [[1, 0, 0, 0, 0, 0], [0, 0, 2, 0, 0, 0], [0, 1, 0, 0, 0, 0]] {
                let penalties = upload(&mut host, "penalties", &row, &[1, PENALTY_WORDS]);
                let error = penalize(&mut host.exec, &mut logits, &counts, &penalties, &drafts).unwrap_err();
                assert_eq!(error.message, "a row's penalties are out of range");
            }
        });
    }
}
