//! Applies the logits processors of requests to rows of logits.

use super::check::Check;
use crate::cpu;
use crate::cuda;
use crate::packed_logits_updates::{EDIT_WORDS, NO_MASK, SPAN_WORDS};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Changes logits in place before `sample`: first each edit of a row (`LogitEdit::apply`), then every token outside the
/// row's mask becomes -inf. In f32, with every operation rounded, so devices agree bit by bit.
///
/// `logits`: `[rows, vocab]` f32; `spans`: `[rows, SPAN_WORDS]`, `edits`: `[edits, EDIT_WORDS]`, `masks`: `[masks,
/// vocab / 32 rounded up]`, all u32, in the layout of [`PackedLogitsUpdates`](super::PackedLogitsUpdates). A row has at
/// most one edit per token. Does not wait for a GPU. An error on the CPU if a span or a token is out of range.
pub fn adjust_logits(
    exec: &mut Exec,
    logits: &mut Tensor,
    spans: &Tensor,
    edits: &Tensor,
    masks: &Tensor,
) -> Result<(), OpError> {
    let check = Check("adjust_logits");
    let ((rows, vocab), count, words) = (logits.rows_cols(), edits.rows_cols().0, masks.rows_cols().0);
    check.is(logits, DType::F32, &[rows, vocab])?;
    check.is(spans, DType::U32, &[rows, SPAN_WORDS])?;
    check.is(edits, DType::U32, &[count, EDIT_WORDS])?;
    check.is(masks, DType::U32, &[words, vocab.div_ceil(32)])?;
    exec.record(|device| {
        let kernel = if device == Device::Cuda { "adjust" } else { "rows" };
        // A logit is read and written per edit, and written per token of a mask at most.
        let bytes = spans.bytes() + edits.bytes() + masks.bytes() + (8 * count + 4 * words * vocab) as u64;
        let reads = [&*logits, spans, edits, masks];
        OpRecord::new("adjust_logits", kernel, &reads, &[&*logits], 2 * count as u64).with_bytes(bytes)
    });
    match exec.device() {
        Device::Cpu(_) => {
            let ranges = spans.host::<u32>().as_chunks::<SPAN_WORDS>().0.iter();
            let within = |&[first, end, mask]: &[u32; SPAN_WORDS]| {
                first <= end && end as usize <= count && (mask == NO_MASK || (mask as usize) < words)
            };
            check.that(ranges.into_iter().all(within), "a span is out of range")?;
            let mut tokens = edits.host::<u32>().as_chunks::<EDIT_WORDS>().0.iter().map(|edit| edit[0]);
            check.that(tokens.all(|token| (token as usize) < vocab), "a token is not in the vocabulary")?;
            cpu::adjust::adjust_rows(logits.host_mut(), vocab, spans.host(), edits.host(), masks.host());
        }
        Device::Cuda => cuda::adjust_logits(exec, logits, spans, edits, masks)?,
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed_logits_updates::PackedLogitsUpdates;
    use crate::testing::Host;
    use pegainfer_core::logits_processors::{LogitEdit, LogitsUpdate, TokenMask};
    use pegainfer_core::rng;
    use std::sync::Arc;

    fn logit(i: usize) -> f32 {
        (rng::bits(7, i as u64) >> 40) as f32 / (1 << 20) as f32 - 8.0
    }

    /// A row without an update, one of edits, two that share a mask, one of both.
    fn adjustments(vocab: usize) -> Vec<Option<LogitsUpdate>> {
        let edit = |i: usize| {
            let add = [0.0, -1.5, f32::NEG_INFINITY, 100.0][i % 4];
            LogitEdit { token: (i * 5 % vocab) as u32, scale: [1.0, 1.3, 0.5][i % 3], add }
        };
        let edits: Vec<LogitEdit> = (0..vocab.min(40)).map(edit).collect();
        let mask = |n: usize| {
            let ids: Vec<u32> = (0..vocab as u32).filter(|id| (*id as usize).is_multiple_of(n)).collect();
            Some(Arc::new(TokenMask::new(&ids, vocab)))
        };
        let shared = LogitsUpdate { allowed: mask(3), ..LogitsUpdate::default() };
        let both = LogitsUpdate { edits: edits.clone(), allowed: mask(2), penalties: None };
        vec![
            None,
            Some(LogitsUpdate { edits, ..LogitsUpdate::default() }),
            Some(shared.clone()),
            Some(both),
            Some(shared),
        ]
    }

    fn reference(logits: &mut [f32], logits_update: &LogitsUpdate) {
        for (token, logit) in logits.iter_mut().enumerate() {
            if let Some(edit) = logits_update.edits.iter().find(|edit| edit.token as usize == token) {
                *logit = if *logit > 0.0 { *logit / edit.scale } else { *logit * edit.scale } + edit.add;
            }
            let allowed = logits_update.allowed.as_ref();
            if allowed.is_some_and(|mask| mask.words()[token / 32] & (1 << (token % 32)) == 0) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    fn upload(host: &mut Host, name: &str, words: &[u32], width: usize) -> Tensor {
        let mut tensor = host.zeros(name, &[words.len() / width, width], DType::U32);
        tensor.host_mut::<u32>().copy_from_slice(words);
        tensor
    }

    #[test]
    fn every_row_gets_its_own_update() {
        // Not a multiple of 5, so that no row has a token twice.
        for vocab in [1, 33, 64, 1001] {
            Host::each(|mut host| {
                let adjustments = adjustments(vocab);
                let packed = PackedLogitsUpdates::new(adjustments.iter().map(Option::as_ref), vocab);
                assert_eq!(packed.masks.len(), 2 * vocab.div_ceil(32), "a shared mask is packed once");
                let mut expected: Vec<f32> = (0..adjustments.len() * vocab).map(logit).collect();
                let mut logits = host.zeros("logits", &[adjustments.len(), vocab], DType::F32);
                logits.host_mut::<f32>().copy_from_slice(&expected);
                for (row, logits_update) in expected.chunks_mut(vocab).zip(&adjustments) {
                    logits_update.iter().for_each(|logits_update| reference(row, logits_update));
                }
                let spans = upload(&mut host, "spans", &packed.spans, SPAN_WORDS);
                let edits = upload(&mut host, "edits", &packed.edits, EDIT_WORDS);
                let masks = upload(&mut host, "masks", &packed.masks, vocab.div_ceil(32));
                adjust_logits(&mut host.exec, &mut logits, &spans, &edits, &masks).unwrap();
                assert_eq!(logits.host::<f32>(), expected);
            });
        }
    }

    #[test]
    fn a_mask_of_fewer_tokens_allows_none_after_them() {
        Host::each(|mut host| {
            let update = |ids: &[u32]| {
                Some(LogitsUpdate { allowed: Some(Arc::new(TokenMask::new(ids, 33))), ..LogitsUpdate::default() })
            };
            let updates = [update(&[1, 32]), update(&[0])];
            let packed = PackedLogitsUpdates::new(updates.iter().map(Option::as_ref), 96);
            let mut logits = host.zeros("logits", &[2, 96], DType::F32);
            let spans = upload(&mut host, "spans", &packed.spans, SPAN_WORDS);
            let edits = upload(&mut host, "edits", &[0; EDIT_WORDS], EDIT_WORDS);
            let masks = upload(&mut host, "masks", &packed.masks, 3);
            adjust_logits(&mut host.exec, &mut logits, &spans, &edits, &masks).unwrap();
            let kept = logits.host::<f32>().iter().enumerate().filter(|(_, logit)| **logit == 0.0);
            assert_eq!(kept.map(|(i, _)| i).collect::<Vec<_>>(), [1, 32, 96]);
        });
    }

    #[test]
    fn what_is_out_of_range_is_refused() {
        Host::each(|mut host| {
            let mut logits = host.zeros("logits", &[1, 40], DType::F32);
            let masks = upload(&mut host, "masks", &[0, 0], 2);
            for (span, token, message) in [
                ([0, 2, NO_MASK], 0, "a span is out of range"),
                ([0, 1, 1], 0, "a span is out of range"),
                ([0, 1, 0], 40, "a token is not in the vocabulary"),
            ] {
                let spans = upload(&mut host, "spans", &span, SPAN_WORDS);
                let edits = upload(&mut host, "edits", &[token, 0, 0], EDIT_WORDS);
                let error = adjust_logits(&mut host.exec, &mut logits, &spans, &edits, &masks).unwrap_err();
                assert_eq!(error.message, message);
            }
        });
    }
}
