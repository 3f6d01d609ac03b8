//! Speculative decoding: several tokens of a sequence in one step.
//!
//! A [`Drafter`] proposes the tokens that probably follow. The step computes the newest token and the drafts as one
//! chunk and samples after each of them. The first sample is the next token, as without drafts. If it equals the first
//! draft, the second sample is the token after it, and so on. The first sample that differs from its draft is the last
//! one used.
//!
//! A draft is a single token, so this is rejection sampling with a proposal that has all its mass on one token. A draft
//! `x` is accepted with the model's probability of `x`, and a refused draft is replaced by a draw from the rest. The
//! random number of each position is the same as without drafts. So is the text, greedy or sampled, apart from the
//! order of sums if that depends on the size of the step.
//!
//! Drafts come from the host, which looks them up in the text, or from the model itself (multi-token prediction); see
//! [`DraftSource`].
//!
//! Under a [grammar](crate::grammar) the drafts are tried when the tokens before them are known, on the thread that
//! computes masks. Drafts up to the first that the grammar forbids are verified, each sample with the mask of its
//! position.
//!
//! Drafts pay off while a few more tokens cost a step little. Their number is chosen for each step from acceptance
//! rates and measured step times ([`depth`]).

pub(super) mod depth;
mod prompt_lookup;

pub use prompt_lookup::{PromptLookup, Suffix};

use std::fmt::Debug;
use std::sync::Arc;

/// Maximum number of draft tokens of a sequence in one step.
pub const MAX_DRAFT_TOKENS: usize = 32;

/// Drafter of one sequence.
pub trait Drafter: Debug + Send {
    /// Up to `max_drafts` tokens that probably follow `tokens`, which is prompt and generated text. Each call's
    /// `tokens` start with those of the previous call.
    fn propose(&mut self, tokens: &[u32], max_drafts: usize) -> Vec<u32>;
}

/// Creates the drafters of new sequences.
pub trait DraftMethod: Debug + Send + Sync {
    /// A drafter for a new sequence.
    fn start(&self) -> Box<dyn Drafter>;
}

/// Source of drafts.
#[derive(Debug, Clone)]
pub enum DraftSource {
    /// A drafter for each sequence, on the host.
    Host(Arc<dyn DraftMethod>),
    /// The model: after each step its executor makes [`StepRow::model_drafts`] drafts and returns them in
    /// [`Outcome::drafts`]. Nothing is planned while a step is in flight, because the next step starts with them.
    ///
    /// [`StepRow::model_drafts`]: super::StepRow::model_drafts
    /// [`Outcome::drafts`]: super::Outcome::drafts
    Model(ModelMethod),
}

/// Method by which a model drafts. A checkpoint has layers for at most one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelMethod {
    /// Multi-token prediction: one layer that drafts autoregressively.
    Mtp,
    /// DSpark: a block of drafts in one pass.
    DSpark,
}

/// Speculative decoding options of an engine.
#[derive(Debug, Clone)]
pub struct Speculation {
    /// Maximum number of draft tokens of a sequence in one step, 1 to [`MAX_DRAFT_TOKENS`].
    pub num_tokens: usize,
    /// Source of the drafts.
    pub source: DraftSource,
    /// If true, verify only drafts that are worth their time; otherwise as many as the step has capacity for.
    pub adaptive: bool,
    /// The model only drafts token ids below this, so executors read only this number of rows of the output matrix for
    /// a draft. `None`: any id.
    pub draft_vocab_size: Option<usize>,
    /// Benchmarking only: accept this many tokens per verified row on average, whatever the model chose. The text is
    /// then meaningless. Implemented by executors.
    pub synthetic_acceptance_length: Option<f64>,
}

impl Speculation {
    /// True if the model itself drafts.
    pub fn by_model(this: Option<&Self>) -> bool {
        Self::model_method(this).is_some()
    }

    /// Draft method of the model; `None` if it does not draft.
    pub fn model_method(this: Option<&Self>) -> Option<ModelMethod> {
        match this?.source {
            DraftSource::Model(method) => Some(method),
            DraftSource::Host(_) => None,
        }
    }

    /// Maximum number of samples in a step of `sequences` sequences and up to `tokens` tokens. `None`: an engine
    /// without drafts.
    pub fn samples(this: Option<&Self>, sequences: usize, tokens: usize) -> usize {
        let drafts = this.map_or(0, |speculation| speculation.num_tokens);
        (sequences * (1 + drafts)).min(tokens).max(sequences)
    }
}

/// Treatment of the model's state after draft tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftState {
    /// All state is stored per token: accepted drafts keep theirs, that of refused drafts is overwritten.
    Kept,
    /// The state after drafts is dropped, and the next step computes accepted drafts again.
    Recomputed,
}
