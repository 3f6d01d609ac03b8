//! Grammars: masks of the tokens that may come next, computed off the engine thread.
//!
//! A [`Grammar`] belongs to a request, a [`GrammarTracker`] follows one sequence under it. The mask of the next token
//! is computed on another thread, usually during the forward pass that computes the logits to mask. It can take longer
//! than a step. After a late mask a sequence skips steps, so that other sequences do not wait for it again and again.
//!
//! Drafts (speculative decoding) need the mask behind each of them before any is sampled. A copy of the matcher, a fork, is
//! advanced by the drafts as far as the grammar allows them ([`Lookahead`]). When the tokens of the step are known, the matcher
//! follows them; if all drafts were among them, the fork takes its place.

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

    /// A text from which whoever made the grammar can make it again, for recordings; empty for a grammar that nobody records.
    fn source(&self) -> String {
        String::new()
    }
}

/// A position in a text of a grammar.
pub trait Matcher: Send {
    /// Advances by one token; returns the mask of the next token, which allows at least one (after a complete text, the EOS
    /// tokens).
    ///
    /// # Errors
    /// One sentence for the client; the matcher must not be used again.
    fn next(&mut self, token: u32) -> Result<Arc<TokenMask>, String>;

    /// Advances by one token as [`next`](Self::next) does, without the mask, which is most of the work for some grammars.
    ///
    /// # Errors
    /// As `next`.
    fn consume(&mut self, token: u32) -> Result<(), String> {
        self.next(token).map(drop)
    }

    /// A matcher at the same position, to try drafts with. `None`, the default: its sequence has no drafts.
    fn fork(&self) -> Option<Box<dyn Matcher>> {
        None
    }
}

/// What may follow a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lookahead {
    /// Mask of the next token.
    pub mask: Arc<TokenMask>,
    /// Drafts that the grammar allows there, one behind the other, each with the mask of the token behind it.
    pub drafts: Vec<(u32, Arc<TokenMask>)>,
}

impl Lookahead {
    /// Tries `drafts` behind the text of `matcher`, up to the first that is not allowed; returns a matcher behind them. A fork that fails
    /// ends the drafts and not the text, in which that token may never come.
    fn extend(&mut self, matcher: &dyn Matcher, drafts: &[u32]) -> Option<Box<dyn Matcher>> {
        drafts.first().filter(|first| self.mask.allows(**first))?;
        let mut fork = matcher.fork()?;
        for draft in drafts {
            let mask = self.drafts.last().map_or(&self.mask, |(_, mask)| mask);
            if !mask.allows(*draft) {
                break;
            }
            let behind = fork.next(*draft).ok()?;
            self.drafts.push((*draft, behind));
        }
        Some(fork)
    }
}

/// The end of a text.
struct Position {
    matcher: Box<dyn Matcher>,
    lookahead: Arc<Lookahead>,
    /// A matcher behind the drafts of `lookahead`.
    fork: Option<Box<dyn Matcher>>,
}

impl Position {
    /// The end of the text after `tokens` more, and what may follow there; `drafts` are tried.
    fn advance(self, tokens: &[u32], drafts: &[u32]) -> Result<Self, String> {
        let Self { mut matcher, lookahead, fork } = self;
        let (mut tokens, mut mask) = (tokens, lookahead.mask.clone());
        let tried = &lookahead.drafts;
        let came_true =
            tokens.len() >= tried.len() && tokens.iter().zip(tried).all(|(token, (draft, _))| token == draft);
        if let (Some(fork), Some((_, behind)), true) = (fork, tried.last(), came_true) {
            (matcher, mask, tokens) = (fork, behind.clone(), &tokens[tried.len()..]);
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
    /// Tells that a computation has ended.
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

    /// As [`new`](Self::new); `signal` tells when later masks are ready.
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

    /// Adds generated tokens: another thread starts to compute the next mask, and tries `drafts` behind it.
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

    /// Mask of the next token; `None` while it is computed, and after a failure.
    pub fn mask(&self) -> Option<Arc<TokenMask>> {
        self.lookahead().map(|lookahead| lookahead.mask.clone())
    }

    /// What may follow; `None` while it is computed, and after a failure.
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

    /// Error because of which the sequence cannot continue.
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
            // Before the look at the state: what ends after it is waited for in vain otherwise.
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
