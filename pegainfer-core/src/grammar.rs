//! Grammars: masks of the allowed next tokens, computed off the engine thread.
//!
//! A [`Grammar`] belongs to a request; a [`GrammarTracker`] follows one sequence under it. The mask of the next token
//! is computed on another thread, usually during the forward pass whose logits it masks. It can take longer than a
//! step. After a late mask a sequence skips steps, so that it does not delay other sequences repeatedly.
//!
//! Speculative decoding needs the mask after each draft before any token is sampled. A copy of the matcher, a fork, is
//! advanced by the drafts as far as the grammar allows ([`Lookahead`]). When the tokens of the step are known, the
//! matcher is advanced by them; if all drafts were among them, the fork replaces it.

mod signal;
#[cfg(test)]
mod tests;

pub use signal::MaskSignal;

use crate::logits_processors::TokenMask;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A set of texts, represented by the tokens that spell them.
pub trait Grammar: fmt::Debug + Send + Sync {
    /// A matcher at the beginning of a text, and the mask of its first token.
    fn start(&self) -> (Box<dyn Matcher>, Arc<TokenMask>);

    /// A text from which the grammar can be built again, for recordings; empty if it is never recorded.
    fn source(&self) -> String {
        String::new()
    }
}

/// A position in a text of a grammar.
pub trait Matcher: Send {
    /// Advances by one token; returns the mask of the next token, which allows at least one token (the EOS tokens after
    /// a complete text).
    ///
    /// # Errors
    /// One sentence for the client; the matcher must not be used again.
    fn next(&mut self, token: u32) -> Result<Arc<TokenMask>, String>;

    /// Advances by one token like [`next`](Self::next) but computes no mask, which is most of the work for some
    /// grammars.
    ///
    /// # Errors
    /// See `next`.
    fn consume(&mut self, token: u32) -> Result<(), String> {
        self.next(token).map(drop)
    }

    /// A matcher at the same position, for trying drafts. `None`, the default: sequences of this grammar have no
    /// drafts.
    fn fork(&self) -> Option<Box<dyn Matcher>> {
        None
    }
}

/// Masks after a text and after drafts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lookahead {
    /// Mask of the next token.
    pub mask: Arc<TokenMask>,
    /// Allowed drafts in order, each with the mask of the token after it.
    pub drafts: Vec<(u32, Arc<TokenMask>)>,
}

impl Lookahead {
    /// Tries `drafts` after the text of `matcher`, up to the first forbidden one; returns a matcher advanced by them.
    /// If the fork fails, the drafts end there, but not the text, which may never contain that token.
    fn extend(&mut self, matcher: &dyn Matcher, drafts: &[u32]) -> Option<Box<dyn Matcher>> {
        drafts.first().filter(|first| self.mask.allows(**first))?;
        let mut fork = matcher.fork()?;
        for draft in drafts {
            let mask = self.drafts.last().map_or(&self.mask, |(_, mask)| mask);
            if !mask.allows(*draft) {
                break;
            }
            let mask = fork.next(*draft).ok()?;
            self.drafts.push((*draft, mask));
        }
        Some(fork)
    }
}

/// Position at the end of a text.
struct Position {
    matcher: Box<dyn Matcher>,
    lookahead: Arc<Lookahead>,
    /// A matcher advanced by the drafts of `lookahead`.
    fork: Option<Box<dyn Matcher>>,
}

impl Position {
    /// Advances the text by `tokens`, and tries `drafts` after it.
    fn advance(self, tokens: &[u32], drafts: &[u32]) -> Result<Self, String> {
        let Self { mut matcher, lookahead, fork } = self;
        let (mut tokens, mut mask) = (tokens, lookahead.mask.clone());
        let tried = &lookahead.drafts;
        let matched = tokens.len() >= tried.len() && tokens.iter().zip(tried).all(|(token, (draft, _))| token == draft);
        if let (Some(fork), Some((_, next_mask)), true) = (fork, tried.last(), matched) {
            (matcher, mask, tokens) = (fork, next_mask.clone(), &tokens[tried.len()..]);
        }
        if let Some((last, before)) = tokens.split_last() {
            before.iter().try_for_each(|token| matcher.consume(*token))?;
            mask = matcher.next(*last)?;
        }
        let mut lookahead = Lookahead { mask, drafts: Vec::new() };
        let fork = lookahead.extend(&*matcher, drafts);
        Ok(Self { matcher, lookahead: Arc::new(lookahead), fork })
    }
}

/// Follows one sequence under a grammar.
pub struct GrammarTracker {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    /// Signals that a computation has ended.
    signal: Arc<MaskSignal>,
}

enum State {
    Ready(Position),
    Computing,
    Failed(String),
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // A state is replaced whole: a panic elsewhere cannot leave it half-written.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GrammarTracker {
    /// A tracker at the start of a sequence. The first mask is ready immediately.
    pub fn new(grammar: &dyn Grammar) -> Self {
        Self::with_signal(grammar, Arc::default())
    }

    /// Variant of [`new`](Self::new) with a `signal` that announces later masks.
    pub fn with_signal(grammar: &dyn Grammar, signal: Arc<MaskSignal>) -> Self {
        let (matcher, mask) = grammar.start();
        let lookahead = Arc::new(Lookahead { mask, drafts: Vec::new() });
        let state = Mutex::new(State::Ready(Position { matcher, lookahead, fork: None }));
        Self { shared: Arc::new(Shared { state, signal }) }
    }

    /// Adds a generated token: another thread starts to compute the next mask.
    pub fn push(&mut self, token: u32) {
        self.advance(vec![token], Vec::new());
    }

    /// Adds generated tokens: another thread starts to compute the next mask and tries `drafts` after it.
    pub fn advance(&mut self, tokens: Vec<u32>, drafts: Vec<u32>) {
        let mut state = self.shared.state();
        let State::Ready(position) = std::mem::replace(&mut *state, State::Computing) else {
            *state = State::Failed("a token was generated that the grammar did not wait for".to_owned());
            return;
        };
        drop(state);
        let shared = self.shared.clone();
        rayon::spawn(move || {
            let next = catch_unwind(AssertUnwindSafe(|| position.advance(&tokens, &drafts)));
            *shared.state() = match next {
                Ok(Ok(position)) => State::Ready(position),
                Ok(Err(error)) => State::Failed(error),
                Err(_) => State::Failed("the grammar matcher panicked; this is a bug".to_owned()),
            };
            shared.signal.notify();
        });
    }

    /// Mask of the next token; `None` while it is being computed, and after a failure.
    pub fn mask(&self) -> Option<Arc<TokenMask>> {
        self.lookahead().map(|lookahead| lookahead.mask.clone())
    }

    /// Masks of the next tokens; `None` while they are being computed, and after a failure.
    pub fn lookahead(&self) -> Option<Arc<Lookahead>> {
        match &*self.shared.state() {
            State::Ready(position) => Some(position.lookahead.clone()),
            State::Computing | State::Failed(_) => None,
        }
    }

    /// True while the mask of the next token is computed.
    pub fn is_computing(&self) -> bool {
        matches!(&*self.shared.state(), State::Computing)
    }

    /// Error that ends the sequence.
    pub fn failure(&self) -> Option<String> {
        match &*self.shared.state() {
            State::Failed(error) => Some(error.clone()),
            State::Computing | State::Ready(..) => None,
        }
    }

    /// Waits until the mask is ready, the computation failed, or `limit` has passed.
    pub fn wait(&self, limit: Duration) {
        let (signal, start) = (&self.shared.signal, Instant::now());
        loop {
            // Read before the state; otherwise the wait could miss a computation that ends in between.
            let seen = signal.ended();
            let left = limit.saturating_sub(start.elapsed());
            if !self.is_computing() || left.is_zero() {
                return;
            }
            signal.wait(seen, left);
        }
    }
}

impl fmt::Debug for GrammarTracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &*self.shared.state() {
            State::Ready(..) => "ready",
            State::Computing => "computing",
            State::Failed(_) => "failed",
        };
        f.debug_tuple("GrammarTracker").field(&state).finish()
    }
}
