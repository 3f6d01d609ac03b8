//! Grammar state of a sequence in the scheduler.
//!
//! Masks are computed on another thread and may become ready at any time, usually during the forward pass whose logits
//! they mask. After a late mask the grammar counts as slow for [`SLOW_TOKENS`] tokens: its sequence then waits for each
//! mask before it is planned, so that other sequences do not wait. The scheduler reads masks once before each plan. A
//! plan therefore depends only on facts known when it began, and a recorded schedule can be replayed.
//!
//! Drafts are tried when the tokens before them are passed to the grammar, so that their masks are ready together with
//! that of the next token. A step verifies the allowed drafts, or the first of them.

use crate::grammar::{Grammar, GrammarTracker, Lookahead, MaskSignal};
use crate::logits_processors::TokenMask;
use std::sync::Arc;

/// Number of tokens for which a grammar counts as slow after a late mask. A late mask delays a step; this limits how
/// often that happens.
const SLOW_TOKENS: usize = 16;

/// Grammar of a sequence, if any, and the mask of its next token.
#[derive(Debug)]
pub(super) enum SequenceGrammar {
    /// Any text is allowed.
    None,
    /// Followed by a tracker.
    Tracked {
        tracker: GrammarTracker,
        /// Masks of the next tokens, once the scheduler has seen them.
        lookahead: Option<Arc<Lookahead>>,
        /// Generated tokens that the tracker has not received yet.
        pushed: Vec<u32>,
        /// Remaining number of tokens for which the grammar counts as slow.
        slow: usize,
    },
    /// Stand-in during the replay of a recorded schedule: only knows whether the plan waited for the grammar.
    Replayed { is_waited_for: bool },
}

impl SequenceGrammar {
    /// Grammar state at the start of a sequence, whose first mask is ready. `signal` announces later masks.
    pub fn new(grammar: Option<Arc<dyn Grammar>>, signal: &Arc<MaskSignal>) -> Self {
        let Some(grammar) = grammar else { return Self::None };
        let tracker = GrammarTracker::with_signal(&*grammar, signal.clone());
        let lookahead = tracker.lookahead();
        Self::Tracked { tracker, lookahead, pushed: Vec::new(), slow: 0 }
    }

    /// True if there is a grammar.
    pub fn is_some(&self) -> bool {
        !matches!(self, Self::None)
    }

    /// Reads whether the mask of the next token is ready.
    pub fn update_mask(&mut self) {
        if let Self::Tracked { tracker, lookahead: lookahead @ None, .. } = self {
            *lookahead = tracker.lookahead();
        }
    }

    /// Sets whether the plan waits for the grammar, in a replay.
    pub fn set_waited_for(&mut self, waited_for: bool) {
        if let Self::Replayed { is_waited_for } = self {
            *is_waited_for = waited_for;
        }
    }

    /// True if there is a grammar and the mask of its next token was not ready.
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

    /// Marks the grammar as slow, because a step waited for its mask in vain.
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

    /// Mask of the token after the first `drafts` of [`drafts`](Self::drafts), if it was ready.
    pub fn mask_after(&self, drafts: usize) -> Option<Arc<TokenMask>> {
        let Lookahead { mask, drafts: tried } = self.lookahead()?;
        Some(drafts.checked_sub(1).map_or(mask, |last| &tried[last].1).clone())
    }

    /// Up to `max_drafts` allowed drafts, of those that were tried.
    pub fn drafts(&self, max_drafts: usize) -> Vec<u32> {
        let tried = self.lookahead().map_or(&[][..], |lookahead| &lookahead.drafts);
        tried.iter().take(max_drafts).map(|(draft, _)| *draft).collect()
    }

    /// Tracker that computes masks on another thread.
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

    /// True if there are tokens for [`advance`](Self::advance).
    pub fn lags(&self) -> bool {
        matches!(self, Self::Tracked { pushed, .. } if !pushed.is_empty())
    }

    /// Passes the generated tokens to the tracker, which computes the next mask and tries `drafts`.
    pub fn advance(&mut self, drafts: Vec<u32>) {
        if let Self::Tracked { tracker, pushed, .. } = self {
            tracker.advance(std::mem::take(pushed), drafts);
        }
    }
}
