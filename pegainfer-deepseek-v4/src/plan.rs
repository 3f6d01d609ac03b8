//! The work of one step, as the scheduler of pegainfer-core hands it to the executor.

use pegainfer_core::schedule;
pub use pegainfer_core::schedule::{NO_STATE, Outcome, SampleRow, Segment, StepRow};
pub use pegainfer_kernels::ops::deepseek_v4::PAGE_TOKENS;

/// The work of one step. Its KV blocks are pages of compressed entries. Its `state` gives the slot in which each row's
/// sequence keeps its newest tokens; before the step, a row that changes its slot copies the old one.
pub type Step = schedule::Step<Segment>;

/// A step of `batch` equal rows that each add `tokens` tokens to `context - tokens` computed ones, and sample, see
/// [`ragged`].
pub fn uniform(batch: usize, tokens: usize, context: usize) -> Step {
    ragged(&vec![(tokens, context); batch])
}

/// A step for plans, measurements and tests, without a scheduler. Rows are given as (new tokens, context with these),
/// and each samples once. Slots and pages are numbered consecutively.
pub fn ragged(rows: &[(usize, usize)]) -> Step {
    let mut step = Step::ragged(PAGE_TOKENS, rows);
    let segment = |((slot, ends), (tokens, context)): ((u32, &[u32]), &(usize, usize))| {
        let from = if tokens == context { NO_STATE } else { slot };
        Segment { first: ends[0], end: ends[1], from, to: slot }
    };
    step.state = (0..).zip(step.qo_indptr.windows(2)).zip(rows).map(segment).collect();
    step
}

/// A step of `batch` rows that each add their newest token and verify `verified` drafts after it. Every token is
/// sampled, and `wanted` drafts are requested. The context is at least `block` tokens. Numbered as in [`ragged`]; for
/// warm-ups.
pub fn speculative(batch: usize, verified: usize, wanted: usize, block: usize) -> Step {
    let tokens = 1 + verified;
    let mut step = uniform(batch, tokens, tokens.max(block));
    for row in &mut step.rows {
        (row.drafts, row.model_drafts) = (verified, wanted);
    }
    let sample = |token: u32| SampleRow { token, ..step.samples[token as usize / tokens].clone() };
    step.samples = (0..step.tokens.len() as u32).map(sample).collect();
    step
}
