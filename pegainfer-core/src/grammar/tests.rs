//! Tests of the tracker.

use super::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Allows the number of tokens so far, and twice that number; fails after 6 tokens. Counts computed masks.
#[derive(Debug, Clone, Default)]
struct Numbers {
    tokens: u32,
    masks: Arc<AtomicUsize>,
}

impl Grammar for Numbers {
    fn start(&self) -> (Box<dyn Matcher>, Arc<TokenMask>) {
        (Box::new(self.clone()), only(0))
    }
}

impl Matcher for Numbers {
    fn next(&mut self, token: u32) -> Result<Arc<TokenMask>, String> {
        self.consume(token)?;
        self.masks.fetch_add(1, Ordering::Relaxed);
        Ok(numbers(self.tokens))
    }

    fn consume(&mut self, token: u32) -> Result<(), String> {
        assert!(token == self.tokens || token == 2 * self.tokens, "it was not asked whether {token} is allowed");
        self.tokens += 1;
        if self.tokens > 6 { Err("seven".into()) } else { Ok(()) }
    }

    fn fork(&self) -> Option<Box<dyn Matcher>> {
        Some(Box::new(self.clone()))
    }
}

fn numbers(tokens: u32) -> Arc<TokenMask> {
    Arc::new(TokenMask::new(&[tokens, 2 * tokens], 40))
}

fn only(token: u32) -> Arc<TokenMask> {
    Arc::new(TokenMask::new(&[token], 40))
}

/// Allows the token after the last one; fails at 3, panics at 5.
#[derive(Debug)]
struct Counting;

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
fn drafts_are_tried_up_to_the_first_that_is_not_allowed_and_change_no_mask() {
    // Drafts after tokens 0 and 1, number of allowed drafts, next tokens, and masks computed for these.
    for (drafts, allowed, tokens, masks) in [
        (vec![], 0, vec![2], 1),
        (vec![3], 0, vec![4], 1),
        (vec![2, 3, 9, 5], 2, vec![2], 1),
        (vec![2, 3, 8], 3, vec![2, 3], 1),
        (vec![2, 3, 8], 3, vec![2, 3, 8], 0),
        (vec![2, 3, 8], 3, vec![2, 3, 8, 5], 1),
        (vec![2, 3, 8], 3, vec![4, 3], 1),
    ] {
        let grammar = Numbers::default();
        let computed = || grammar.masks.load(Ordering::Relaxed);
        let mut tracker = GrammarTracker::new(&grammar);
        tracker.advance(vec![0, 1], drafts.clone());
        tracker.wait(Duration::from_secs(10));
        let lookahead = tracker.lookahead().unwrap();
        assert_eq!((lookahead.mask.clone(), lookahead.drafts.len()), (numbers(2), allowed), "{drafts:?}");
        for (i, (draft, mask)) in lookahead.drafts.iter().enumerate() {
            assert_eq!((*draft, mask), (drafts[i], &numbers(3 + i as u32)), "{drafts:?}");
        }
        assert_eq!(computed(), 1 + allowed);
        tracker.advance(tokens.clone(), vec![]);
        tracker.wait(Duration::from_secs(10));
        assert_eq!(tracker.mask(), Some(numbers(2 + tokens.len() as u32)), "{drafts:?} {tokens:?}");
        assert_eq!(computed(), 1 + allowed + masks, "{drafts:?} {tokens:?}");
    }
}

#[test]
fn a_draft_behind_which_the_grammar_fails_ends_the_drafts_alone() {
    let mut tracker = GrammarTracker::new(&Numbers::default());
    tracker.advance(vec![0, 1, 2, 3], vec![4, 5, 6, 7]);
    tracker.wait(Duration::from_secs(10));
    assert_eq!(tracker.lookahead().map(|lookahead| lookahead.drafts.len()), Some(2), "six tokens");
    tracker.advance(vec![4, 5], vec![6]);
    tracker.wait(Duration::from_secs(10));
    assert_eq!((tracker.mask(), tracker.lookahead().unwrap().drafts.len()), (Some(numbers(6)), 0));
    tracker.push(12);
    tracker.wait(Duration::from_secs(10));
    assert_eq!(tracker.failure().as_deref(), Some("seven"));
}

#[test]
fn failures_and_panics_stay() {
    for (tokens, expected) in [(vec![0, 3], "three"), (vec![0, 3, 4], "did not wait"), (vec![5], "panicked")] {
        let tracker = after(&tokens);
        assert_eq!(tracker.mask(), None);
        assert!(tracker.failure().unwrap().contains(expected), "{tokens:?}: {tracker:?}");
    }
}

/// The mask after its first token is ready only when the test says so.
#[derive(Debug, Clone)]
struct Stuck(Arc<std::sync::Barrier>);

impl Grammar for Stuck {
    fn start(&self) -> (Box<dyn Matcher>, Arc<TokenMask>) {
        (Box::new(self.clone()), only(0))
    }
}

impl Matcher for Stuck {
    fn next(&mut self, token: u32) -> Result<Arc<TokenMask>, String> {
        self.0.wait();
        Ok(only(token + 1))
    }
}

#[test]
fn who_waits_for_any_mask_does_not_wait_for_the_first_of_them() {
    // Threads for both masks, on any machine.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    pool.install(wait_for_any_mask);
}

fn wait_for_any_mask() {
    let (signal, barrier) = (Arc::<MaskSignal>::default(), Arc::new(std::sync::Barrier::new(2)));
    let mut stuck = GrammarTracker::with_signal(&Stuck(barrier.clone()), signal.clone());
    let mut other = GrammarTracker::with_signal(&Counting, signal.clone());
    let seen = signal.ended();
    stuck.push(0);
    other.push(0);
    let start = Instant::now();
    signal.wait(seen, Duration::from_secs(10));
    assert!(stuck.is_computing() && other.mask().is_some() && start.elapsed() < Duration::from_secs(5));
    // A mask that was ready before the wait began is not waited for.
    signal.wait(seen, Duration::from_secs(10));
    assert!(start.elapsed() < Duration::from_secs(5));
    barrier.wait();
    signal.wait(seen + 1, Duration::from_secs(10));
    assert!(stuck.mask().is_some() && signal.ended() == seen + 2);
}
