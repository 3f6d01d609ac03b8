//! Builds the step of a plan for the executor.

use super::Scheduler;
use super::chunk::Chunk;
use crate::images;
use crate::schedule::state::SequenceState;
use crate::schedule::step::{SampleRow, Step, StepRow};
use crate::schedule::step_executor::STEPS_IN_FLIGHT;
use std::iter::once_with;

impl<S: SequenceState> Scheduler<S> {
    /// The step in which each running sequence, oldest first, gets its chunk of `chunks`.
    pub(super) fn build_step(&mut self, chunks: &[Chunk]) -> Step<S::Row> {
        let chosen = || chunks.iter().enumerate().filter(|(_, chunk)| chunk.tokens > 0);
        if chosen().next().is_none() {
            return Step::default();
        }
        let has_images = chosen().any(|(i, _)| !self.running[i].request.images.is_empty());
        let mut step = self.spare_steps.pop().unwrap_or_default();
        step.clear();
        step.encode = self.encoding.take_part();
        step.qo_indptr.push(0);
        for (i, Chunk { tokens, drafts, model_drafts, .. }) in chosen() {
            let seq = &mut self.running[i];
            let range = seq.planned..seq.planned + tokens;
            let with_drafts = range.start..range.end + drafts.len();
            if seq.prompt_logprobs.is_some() {
                let (first, tokens) = (step.tokens.len(), &seq.tokens[..seq.prompt_len]);
                let known =
                    range.clone().zip(first..).filter_map(|(p, t)| Some((t as u32, p + 1, *tokens.get(p + 1)?)));
                let requested = seq.request.prompt_logprobs;
                step.samples.extend(known.map(|(t, p, token)| SampleRow::of_prompt(seq.id, t, p, token, requested)));
            }
            let first = step.tokens.len() as u32;
            self.state.plan(&mut seq.slot, range.clone(), drafts.len() as u32, first, &mut step.state);
            seq.write_inputs(range.clone(), &mut step.tokens);
            if with_drafts.len() == 1 {
                step.positions.push(with_drafts.start as u32);
            } else {
                step.tokens.extend_from_slice(drafts);
                step.positions.extend(with_drafts.start as u32..with_drafts.end as u32);
            }
            if has_images {
                let spans = &seq.request.images;
                step.rope_positions.extend(with_drafts.clone().map(|i| images::rope_position(spans, i)));
                step.images.extend(images::parts(spans, range.clone(), first as usize));
            }
            seq.table.write_slots(with_drafts.clone(), &mut step.slots);
            step.qo_indptr.push(step.tokens.len() as u32);
            step.kv_lens.push(with_drafts.end as u32);
            step.block_tables.push(seq.table.blocks().clone());
            step.rows.push(StepRow {
                id: seq.id,
                sequence: seq.index,
                computed: range.end,
                drafts: drafts.len(),
                next: seq.tokens.get(range.end).copied(),
                model_drafts: *model_drafts,
            });
            if let (Some(slot), Some(adapter)) = (seq.adapter_slot, &seq.request.adapter) {
                step.adapters.add(step.rows.len() - 1, slot, adapter);
            }
            seq.planned = range.end;
            seq.in_flight += 1;
            seq.recomputed = 0;
            if range.end == seq.len() {
                let (number, position) = (step.samples.len(), range.end as u64);
                let (params, logprobs) = (seq.request.sampling, seq.request.logprobs);
                let token = step.tokens.len() as u32 - drafts.len() as u32 - 1;
                let id = seq.id;
                let deferred = seq.defers_update();
                step.counts.extend(seq.count_update());
                // The request wants one vector, that of its prompt.
                let vector = seq.request.vector && range.end == seq.prompt_len;
                let sample =
                    || SampleRow { id, token, position, logits_update: None, deferred, params, logprobs, vector };
                // Built in place; `push` would build it on the stack and copy it.
                step.samples.extend(once_with(sample));
                if !deferred && seq.changes_logits() {
                    step.samples[number].logits_update = seq.logits_update(range.end);
                }
                if !drafts.is_empty() {
                    let updates = (1..).zip(seq.draft_updates(drafts));
                    step.samples.extend(updates.map(|(i, logits_update)| {
                        let (token, position) = (token + i, position + u64::from(i));
                        SampleRow {
                            id,
                            token,
                            position,
                            logits_update,
                            deferred: false,
                            params,
                            logprobs,
                            vector: false,
                        }
                    }));
                }
                seq.sample = number;
                seq.unknown += 1;
                seq.drafts_in_flight = drafts.len();
            }
        }
        step.adapters.pad(step.rows.len());
        self.in_flight += 1;
        step
    }

    /// Takes back a committed step, to reuse its buffers.
    pub fn recycle(&mut self, step: Step<S::Row>) {
        if self.spare_steps.len() < STEPS_IN_FLIGHT {
            self.spare_steps.push(step);
        }
    }
}
