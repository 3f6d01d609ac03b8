//! Grammars: masks of the tokens that may come next, computed off the engine thread.
//!
//! A [`Grammar`] belongs to a request, a [`GrammarTracker`] follows one sequence under it. The mask of the next token can
//! take longer than a step, so it is computed on another thread; a sequence whose mask is not ready skips steps, and the
//! other sequences do not wait for it.

use crate::logits_processors::TokenMask;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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
}

/// Follows one sequence under a grammar.
pub struct GrammarTracker {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

enum State {
    Ready(Box<dyn Matcher>, Arc<TokenMask>),
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
        let (matcher, mask) = grammar.start();
        Self { shared: Arc::new(Shared { state: Mutex::new(State::Ready(matcher, mask)), changed: Condvar::new() }) }
    }

    /// Adds a generated token: another thread starts to compute the next mask.
    pub fn push(&mut self, token: u32) {
        let mut state = self.shared.state();
        let State::Ready(mut matcher, _) = std::mem::replace(&mut *state, State::Computing) else {
            *state = State::Failed("a token was generated that the grammar did not wait for".to_owned());
            return;
        };
        drop(state);
        let shared = self.shared.clone();
        rayon::spawn(move || {
            let next = catch_unwind(AssertUnwindSafe(|| matcher.next(token)));
            *shared.state() = match next {
                Ok(Ok(mask)) => State::Ready(matcher, mask),
                Ok(Err(error)) => State::Failed(error),
                Err(_) => State::Failed("the grammar matcher panicked; this is a bug".to_owned()),
            };
            shared.changed.notify_all();
        });
    }

    /// Mask of the next token; `None` while it is computed, and after a failure.
    pub fn mask(&self) -> Option<Arc<TokenMask>> {
        match &*self.shared.state() {
            State::Ready(_, mask) => Some(mask.clone()),
            State::Computing | State::Failed(_) => None,
        }
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
        let computing = |state: &mut State| matches!(state, State::Computing);
        // Poisoned or not, the caller checks the state again.
        let _ = self.shared.changed.wait_timeout_while(self.shared.state(), limit, computing);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Allows the token after the last one; fails at 3, panics at 5.
    #[derive(Debug)]
    struct Counting;

    fn only(token: u32) -> Arc<TokenMask> {
        Arc::new(TokenMask::new(&[token], 40))
    }

    impl Grammar for Counting {
        fn start(&self) -> (Box<dyn Matcher>, Arc<TokenMask>) {
            (Box::new(Self), only(0))
        }
    }

    impl Matcher for Counting {
        fn next(&mut self, token: u32) -> Result<Arc<TokenMask>, String> {
            assert!(token != 5, "scripted");
            if token == 3 { Err("three".into()) } else { Ok(only(token + 1)) }
        }
    }

    fn after(tokens: &[u32]) -> GrammarTracker {
        let mut tracker = GrammarTracker::new(&Counting);
        for token in tokens {
            tracker.push(*token);
            tracker.wait(Duration::from_secs(10));
        }
        tracker
    }

    #[test]
    fn masks_follow_tokens() {
        assert_eq!(after(&[]).mask(), Some(only(0)));
        let tracker = after(&[0, 1]);
        assert_eq!((tracker.mask(), tracker.failure()), (Some(only(2)), None));
    }

    #[test]
    fn failures_and_panics_stay() {
        for (tokens, expected) in [(vec![0, 3], "three"), (vec![0, 3, 4], "did not wait"), (vec![5], "panicked")] {
            let tracker = after(&tokens);
            assert_eq!(tracker.mask(), None);
            assert!(tracker.failure().unwrap().contains(expected), "{tokens:?}: {tracker:?}");
        }
    }
}
