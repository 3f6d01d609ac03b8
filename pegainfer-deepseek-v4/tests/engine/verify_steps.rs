//! Steps that verify drafts of several sequences with known texts, as a scheduler would plan them.

use pegainfer_deepseek_v4::plan::{self, Outcome, SampleRow, Segment, Step};

/// Pages of a sequence.
const PAGES: usize = 2;
/// Tokens of a sequence in a step over its prompt. Steps of up to 128 tokens give the same bits however they are
/// padded.
const CHUNK: usize = 25;

/// Sequences with the tokens of greedy sampling, partly computed.
pub struct Sequences {
    /// Prompt and generated tokens of each.
    texts: Vec<Vec<u32>>,
    /// Number of tokens of each whose state is on the device.
    computed: Vec<usize>,
}

/// One sequence in one step.
#[derive(Clone, Copy)]
pub struct Plan {
    /// Drafts to verify.
    pub drafts: usize,
    /// Number of right drafts; the next one is wrong.
    pub right: usize,
    /// Drafts that the model is to make.
    pub model_drafts: usize,
}

impl Sequences {
    /// Sequences with these texts; nothing is computed.
    pub fn new(texts: Vec<Vec<u32>>) -> Self {
        let computed = vec![0; texts.len()];
        Self { texts, computed }
    }

    /// A step in which the sequences add these numbers of tokens, without samples.
    fn step(&self, added: impl Iterator<Item = usize>) -> Step {
        let rows = self.computed.iter().zip(added).map(|(computed, added)| (added, computed + added));
        let mut step = plan::ragged(&rows.collect::<Vec<_>>());
        let texts = self.texts.iter().zip(&self.computed).zip(step.qo_indptr.windows(2));
        step.tokens = texts
            .flat_map(|((text, computed), ends)| &text[*computed..][..(ends[1] - ends[0]) as usize])
            .copied()
            .collect();
        // The same pages in all steps.
        let pages = |b: usize| ((PAGES * b) as u32..(PAGES * (b + 1)) as u32).collect();
        step.block_tables = (0..self.texts.len()).map(pages).collect();
        step.samples.clear();
        step
    }

    /// The next [`CHUNK`] tokens of each text, none of which is the last.
    pub fn prompt_chunk(&mut self) -> Step {
        let mut step = self.step(std::iter::repeat(CHUNK));
        for ((computed, text), row) in self.computed.iter_mut().zip(&self.texts).zip(&mut step.rows) {
            *computed += CHUNK;
            row.next = Some(text[*computed]);
        }
        step
    }

    /// A step in which each sequence adds its newest token and verifies drafts.
    pub fn verify(&self, plans: &[Plan]) -> Step {
        let mut step = self.step(plans.iter().map(|plan| 1 + plan.drafts));
        step.samples = (0..step.tokens.len() as u32).map(SampleRow::of_padding).collect();
        for (b, plan) in plans.iter().enumerate() {
            if plan.right < plan.drafts {
                step.tokens[step.qo_indptr[b] as usize + plan.right + 1] ^= 1;
            }
            (step.rows[b].drafts, step.rows[b].model_drafts) = (plan.drafts, plan.model_drafts);
        }
        step
    }

    /// Continues after the right drafts. Returns the number of sequences that drew the text after them, which is all
    /// except close calls on a GPU.
    pub fn accept(&mut self, plans: &[Plan], outcome: &Outcome) -> usize {
        let (mut drawn, mut agreed) = (&outcome.tokens[..], 0);
        for (b, plan) in plans.iter().enumerate() {
            let (own, others) = drawn.split_at(1 + plan.drafts);
            let accepted = 1 + plan.right.min(plan.drafts);
            agreed += usize::from(own[..accepted] == self.texts[b][self.computed[b] + 1..][..accepted]);
            assert_eq!(outcome.drafts[b].len(), plan.model_drafts, "sequence {b}");
            (self.computed[b], drawn) = (self.computed[b] + accepted, others);
        }
        agreed
    }
}

/// Tokens that a step verifies, the last `drafts` of them drafts, after `before` tokens whose state is in slot 0.
pub fn verify(tokens: &[u32], drafts: usize, before: usize, model_drafts: usize) -> Step {
    let mut step = plan::uniform(1, tokens.len(), before + tokens.len());
    let known = (tokens.len() - drafts) as u32;
    step.tokens = tokens.to_vec();
    (step.rows[0].drafts, step.rows[0].model_drafts) = (drafts, model_drafts);
    let sample = step.samples[0].clone();
    step.samples = (known - 1..tokens.len() as u32).map(|token| SampleRow { token, ..sample.clone() }).collect();
    step.state = vec![Segment { first: 0, end: tokens.len() as u32, from: 0, to: 0 }];
    step
}
