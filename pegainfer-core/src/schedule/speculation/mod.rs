//! Speculative decoding: several tokens of a sequence in one step.
//!
//! A [`Drafter`] proposes the tokens that probably follow. The step computes the newest token and the drafts as one chunk,
//! and samples after each of them. The first sample is the next token, as without drafts. Where it is the first draft, the
//! second sample is the token after it, and so on; the first sample that differs from its draft ends what counts.
//!
//! A draft is one token, not a distribution, so this is rejection sampling with a proposal that has all its mass on one token:
//! a draft `x` is accepted with the model's probability of `x`, and a refused one is replaced by a draw from the rest. The
//! random number of each position is the same as without drafts, and so is the text, greedy or sampled (but for the order
//! of sums, where that depends on the size of the step).
//!
//! Drafts come from the host, which looks them up in the text, or from the model itself (multi-token prediction): see
//! [`DraftSource`].
//!
//! Under a [grammar](crate::grammar) the drafts are tried when the tokens before them are known, on the thread that computes
//! masks. Those up to the first that the grammar does not allow are verified, each sample with the mask of its place.
//!
//! Drafts pay while a step costs little more with a few tokens more. How many are worth it is decided for each step from
//! what was accepted and what steps were measured to cost ([`depth`]).

pub(super) mod depth;
mod prompt_lookup;

pub use prompt_lookup::{PromptLookup, Suffix};

use std::fmt::Debug;
use std::sync::Arc;

/// Most draft tokens of a sequence in one step.
pub const MAX_DRAFT_TOKENS: usize = 32;

/// Proposes the tokens of one sequence.
pub trait Drafter: Debug + Send {
    /// At most `max_drafts` tokens that probably follow `tokens`: prompt and generated text so far. They begin with those of
    /// the call before.
    fn propose(&mut self, tokens: &[u32], max_drafts: usize) -> Vec<u32>;
}

/// Makes the drafters of new sequences.
pub trait DraftMethod: Debug + Send + Sync {
    /// A drafter for a new sequence.
    fn start(&self) -> Box<dyn Drafter>;
}

/// Who proposes drafts.
#[derive(Debug, Clone)]
pub enum DraftSource {
    /// A drafter for each sequence, on the host.
    Host(Arc<dyn DraftMethod>),
    /// The model: behind each step its executor makes as many drafts as [`StepRow::model_drafts`] asks for and returns them in
    /// [`Outcome::drafts`]. Nothing is planned while a step is in flight, because the next step begins with them.
    ///
    /// [`StepRow::model_drafts`]: super::StepRow::model_drafts
    /// [`Outcome::drafts`]: super::Outcome::drafts
    Model(ModelMethod),
}

/// How a model drafts. A checkpoint has the layers of one method, if of any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelMethod {
    /// Multi-token prediction: a layer that runs again behind its own drafts.
    Mtp,
    /// DSpark: a block of drafts in one pass.
    DSpark,
}

/// Whether and how an engine drafts.
#[derive(Debug, Clone)]
pub struct Speculation {
    /// Most draft tokens of a sequence in one step, 1 to [`MAX_DRAFT_TOKENS`].
    pub num_tokens: usize,
    /// Who proposes them.
    pub source: DraftSource,
    /// Verify only the drafts that are worth their time; otherwise all that the step has capacity for.
    pub adaptive: bool,
    /// Drafts by the model are token ids below this; `None`: any id. Executors read only that number of rows of the output matrix for a
    /// draft.
    pub draft_vocab_size: Option<usize>,
    /// For timing: so many tokens of each row that verifies drafts count on average, whatever the model chose. The text is then
    /// meaningless. Executors do it.
    pub synthetic_acceptance_length: Option<f64>,
}

impl Speculation {
    /// Whether the model itself drafts.
    pub fn by_model(this: Option<&Self>) -> bool {
        Self::model_method(this).is_some()
    }

    /// How the model itself drafts; `None` if it does not.
    pub fn model_method(this: Option<&Self>) -> Option<ModelMethod> {
        match this?.source {
            DraftSource::Model(method) => Some(method),
            DraftSource::Host(_) => None,
        }
    }

    /// Samples of a step of `sequences` sequences and at most `tokens` tokens; `None` is an engine that does not draft.
    pub fn samples(this: Option<&Self>, sequences: usize, tokens: usize) -> usize {
        let drafts = this.map_or(0, |speculation| speculation.num_tokens);
        (sequences * (1 + drafts)).min(tokens).max(sequences)
    }
}

/// What a model does about the state behind draft tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftState {
    /// All state has an address for each token: that of accepted drafts stays, that of refused ones is overwritten.
    Kept,
    /// The state behind drafts is dropped, and the next step computes the accepted ones again.
    Recomputed,
}
