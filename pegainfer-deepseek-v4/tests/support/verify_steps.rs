//! Steps that verify drafts of several sequences whose texts are known, as a scheduler would plan them.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use pegainfer_core::engine::RequestId;
use pegainfer_deepseek_v4::plan::{self, Outcome, SampleRow, Step};

/// Sequences with the tokens that greedy sampling gives, of which a part is computed.
pub struct Sequences {
    /// Prompt and generated tokens of each.
    texts: Vec<Vec<u32>>,
    /// Tokens of each whose state is on the device.
    computed: Vec<usize>,
}

/// What one step does with a sequence.
#[derive(Clone, Copy)]
pub struct Plan {
    /// Drafts to verify.
    pub drafts: usize,
    /// How many of them are right; the next one is not.
    pub right: usize,
    /// Drafts that the model is to make.
    pub model_drafts: usize,
}

impl Sequences {
    /// Of these texts; nothing is computed.
    pub fn new(texts: Vec<Vec<u32>>) -> Self {
        let computed = vec![0; texts.len()];
        Self { texts, computed }
    }

    /// The step over the first `lengths` tokens of each.
    pub fn prompts(&mut self, lengths: &[usize]) -> Step {
        let mut step = plan::ragged(&lengths.iter().map(|length| (*length, *length)).collect::<Vec<_>>());
        step.tokens = self.texts.iter().zip(lengths).flat_map(|(text, length)| &text[..*length]).copied().collect();
        self.computed = lengths.to_vec();
        step
    }

    /// A step in which each sequence adds its newest token and verifies drafts.
    pub fn verify(&self, plans: &[Plan]) -> Step {
        let rows =
            self.computed.iter().zip(plans).map(|(computed, plan)| (1 + plan.drafts, computed + 1 + plan.drafts));
        let mut step = plan::ragged(&rows.collect::<Vec<_>>());
        (step.tokens, step.samples) = (Vec::new(), Vec::new());
        for (b, (text, plan)) in self.texts.iter().zip(plans).enumerate() {
            let first = self.computed[b];
            for i in 0..=plan.drafts {
                let wrong = u32::from(i == plan.right + 1);
                step.samples
                    .push(SampleRow { id: RequestId(b as u64), ..SampleRow::of_padding(step.tokens.len() as u32) });
                step.tokens.push(text[first + i] ^ wrong);
            }
            (step.rows[b].drafts, step.rows[b].model_drafts) = (plan.drafts, plan.model_drafts);
        }
        step
    }

    /// Checks what a step of [`verify`](Self::verify) drew, and goes on behind the drafts that are right.
    pub fn accept(&mut self, plans: &[Plan], outcome: &Outcome) {
        let mut drawn = &outcome.tokens[..];
        for (b, plan) in plans.iter().enumerate() {
            let (own, others) = drawn.split_at(1 + plan.drafts);
            let accepted = 1 + plan.right.min(plan.drafts);
            assert_eq!(own[..accepted], self.texts[b][self.computed[b] + 1..][..accepted], "sequence {b}");
            assert_eq!(outcome.drafts[b].len(), plan.model_drafts, "sequence {b}");
            (self.computed[b], drawn) = (self.computed[b] + accepted, others);
        }
    }
}
