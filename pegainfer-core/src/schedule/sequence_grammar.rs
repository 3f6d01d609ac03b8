//! The grammar of a sequence, as the scheduler sees it.
//!
//! A mask is computed on another thread and may become ready at any moment. The scheduler looks for it once before each plan, so that
//! a plan is a function of what was known when it began: a recorded schedule can be replayed.

use crate::grammar::{Grammar, GrammarTracker};
use crate::logits_processors::TokenMask;
use std::sync::Arc;

/// Whether a sequence has a grammar, and the mask of its next token.
#[derive(Debug)]
pub(super) enum SequenceGrammar {
    /// Any text is allowed.
    None,
    /// Followed by a tracker; the mask is the one that the scheduler found there last.
    Tracked(GrammarTracker, Option<Arc<TokenMask>>),
    /// In the replay of a recorded schedule: only whether the mask of the next token is ready.
    Replayed { is_ready: bool },
}

impl SequenceGrammar {
    /// At the start of a sequence, whose first mask is ready.
    pub fn new(grammar: Option<Arc<dyn Grammar>>) -> Self {
        let Some(grammar) = grammar else { return Self::None };
        let tracker = GrammarTracker::new(&*grammar);
        let mask = tracker.mask();
        Self::Tracked(tracker, mask)
    }

    /// Whether there is one.
    pub fn is_some(&self) -> bool {
        !matches!(self, Self::None)
    }

    /// Looks whether the mask of the next token is ready.
    pub fn update_mask(&mut self) {
        if let Self::Tracked(tracker, mask @ None) = self {
            *mask = tracker.mask();
        }
    }

    /// In a replay: sets whether the mask of the next token is ready.
    pub fn set_ready(&mut self, ready: bool) {
        if let Self::Replayed { is_ready } = self {
            *is_ready = ready;
        }
    }

    /// Whether there is a grammar, and the mask of its next token was not ready.
    pub fn waits_for_mask(&self) -> bool {
        matches!(self, Self::Tracked(_, None) | Self::Replayed { is_ready: false })
    }

    /// The mask of the next token, if it was ready.
    pub fn mask(&self) -> Option<Arc<TokenMask>> {
        match self {
            Self::Tracked(_, mask) => mask.clone(),
            Self::None | Self::Replayed { .. } => None,
        }
    }

    /// What follows the text on another thread.
    pub fn tracker(&self) -> Option<&GrammarTracker> {
        match self {
            Self::Tracked(tracker, _) => Some(tracker),
            Self::None | Self::Replayed { .. } => None,
        }
    }

    /// Adds a generated token: the next mask is computed.
    pub fn push(&mut self, token: u32) {
        if let Self::Tracked(tracker, mask) = self {
            *mask = None;
            tracker.push(token);
        }
    }
}
