//! The grammar of a sequence, as the scheduler sees it.
//!
//! A mask is computed on another thread and may become ready at any moment, usually during the forward pass that
//! computes the logits to mask. A grammar that was late is slow for its next [`SLOW_TOKENS`] tokens: its sequence then
//! waits for each mask before it is planned, so that other sequences do not wait. The scheduler looks for masks once
//! before each plan, so that a plan depends only on facts that were known when it began: a recorded schedule can be
//! replayed.
//!
//! Drafts are tried when the tokens before them are given to the grammar, so that their masks are ready together with that of the next
//! token. A step verifies those that the grammar allows, or the first of them.

use crate::grammar::{Grammar, GrammarTracker, Lookahead, MaskSignal};
use crate::logits_processors::TokenMask;
use std::sync::Arc;

/// Number of tokens for which a grammar counts as slow after a late mask. A late mask delays a step; this bounds how
/// often that happens.
const SLOW_TOKENS: usize = 16;

/// Whether a sequence has a grammar, and the mask of its next token.
#[derive(Debug)]
pub(super) enum SequenceGrammar {
    /// Any text is allowed.
    None,
    /// Followed by a tracker.
    Tracked {
        tracker: GrammarTracker,
        /// What may follow, once the scheduler found it there.
        lookahead: Option<Arc<Lookahead>>,
        /// Generated tokens that the tracker was not given yet.
        pushed: Vec<u32>,
        /// Number of tokens for which the grammar still counts as slow.
        slow: usize,
    },
    /// In the replay of a recorded schedule: only whether the plan waited for the grammar.
    Replayed { is_waited_for: bool },
}

impl SequenceGrammar {
    /// At the start of a sequence, whose first mask is ready; `signal` tells when later ones are.
    pub fn new(grammar: Option<Arc<dyn Grammar>>, signal: &Arc<MaskSignal>) -> Self {
        let Some(grammar) = grammar else { return Self::None };
        let tracker = GrammarTracker::with_signal(&*grammar, signal.clone());
        let lookahead = tracker.lookahead();
        Self::Tracked { tracker, lookahead, pushed: Vec::new(), slow: 0 }
    }

    /// Whether there is one.
    pub fn is_some(&self) -> bool {
        !matches!(self, Self::None)
    }

    /// Looks whether the mask of the next token is ready.
    pub fn update_mask(&mut self) {
        if let Self::Tracked { tracker, lookahead: lookahead @ None, .. } = self {
            *lookahead = tracker.lookahead();
        }
    }

    /// In a replay: sets whether the plan waits for the grammar.
    pub fn set_waited_for(&mut self, waited_for: bool) {
        if let Self::Replayed { is_waited_for } = self {
            *is_waited_for = waited_for;
        }
    }

    /// True if there is a grammar, and the mask of its next token was not ready.
    pub fn waits_for_mask(&self) -> bool {
        matches!(self, Self::Tracked { lookahead: None, .. })
    }

    /// True if a plan waits for the grammar: it is slow, and its mask was not ready or is that of a token in flight.
    pub fn is_waited_for(&self, in_flight: bool) -> bool {
        match self {
            Self::None => false,
            Self::Tracked { slow, lookahead, .. } => *slow > 0 && (in_flight || lookahead.is_none()),
            Self::Replayed { is_waited_for } => *is_waited_for,
        }
    }

    /// True if the mask could not be computed, so that no token can follow.
    pub fn is_dead(&self) -> bool {
        self.waits_for_mask() && self.tracker().is_some_and(|tracker| tracker.failure().is_some())
    }

    /// Marks the grammar as slow, because a step has waited for its mask in vain.
    pub fn set_late(&mut self) {
        if let Self::Tracked { slow, .. } = self {
            *slow = SLOW_TOKENS;
        }
    }

    fn lookahead(&self) -> Option<&Lookahead> {
        match self {
            Self::Tracked { lookahead, .. } => lookahead.as_deref(),
            Self::None | Self::Replayed { .. } => None,
        }
    }

    /// The mask of the token behind the first `drafts` of [`drafts`](Self::drafts), if it was ready.
    pub fn mask_after(&self, drafts: usize) -> Option<Arc<TokenMask>> {
        let Lookahead { mask, drafts: tried } = self.lookahead()?;
        Some(drafts.checked_sub(1).map_or(mask, |last| &tried[last].1).clone())
    }

    /// At most `max_drafts` drafts that it allows, of those that were tried.
    pub fn drafts(&self, max_drafts: usize) -> Vec<u32> {
        let tried = self.lookahead().map_or(&[][..], |lookahead| &lookahead.drafts);
        tried.iter().take(max_drafts).map(|(draft, _)| *draft).collect()
    }

    /// What follows the text on another thread.
    pub fn tracker(&self) -> Option<&GrammarTracker> {
        match self {
            Self::Tracked { tracker, .. } => Some(tracker),
            Self::None | Self::Replayed { .. } => None,
        }
    }

    /// Adds a generated token, for the next [`advance`](Self::advance).
    pub fn push(&mut self, token: u32) {
        if let Self::Tracked { lookahead, pushed, slow, .. } = self {
            *lookahead = None;
            *slow = slow.saturating_sub(1);
            pushed.push(token);
        }
    }

    /// Whether there are tokens for [`advance`](Self::advance).
    pub fn lags(&self) -> bool {
        matches!(self, Self::Tracked { pushed, .. } if !pushed.is_empty())
    }

    /// Gives the tracker the generated tokens: the next mask is computed, and `drafts` are tried.
    pub fn advance(&mut self, drafts: Vec<u32>) {
        if let Self::Tracked { tracker, pushed, .. } = self {
            tracker.advance(std::mem::take(pushed), drafts);
        }
    }
}
