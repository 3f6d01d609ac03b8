//! Drafts under a grammar, step by step.

use crate::requests::{EOS, Waltz};
use pegainfer_core::engine::{EventBatch, GenerateRequest, RequestId, TokenEvent};
use pegainfer_core::grammar::{Grammar, Matcher};
use pegainfer_core::kv::BlockPool;
use pegainfer_core::logits_processors::TokenMask;
use pegainfer_core::schedule::speculation::{DraftMethod, DraftSource, Drafter, Speculation};
use pegainfer_core::schedule::{Outcome, Scheduler, SchedulerConfig, Step};
use std::sync::Arc;
use std::time::Duration;

/// Drafts 1, 2, 5 after any text. Under [`Waltz`] 5 may not follow 2.
#[derive(Debug)]
struct Always;

impl DraftMethod for Always {
    fn start(&self) -> Box<dyn Drafter> {
        Box::new(Self)
    }
}

impl Drafter for Always {
    fn propose(&mut self, _tokens: &[u32], max_drafts: usize) -> Vec<u32> {
        [1, 2, 5].into_iter().take(max_drafts).collect()
    }
}

/// [`Waltz`], but fails after token 7, which it allows.
#[derive(Debug, Clone)]
struct NoSeven;

impl Grammar for NoSeven {
    fn start(&self) -> (Box<dyn Matcher>, Arc<TokenMask>) {
        (Box::new(Self), Waltz::mask(None))
    }
}

impl Matcher for NoSeven {
    fn next(&mut self, token: u32) -> Result<Arc<TokenMask>, String> {
        if token == 7 { Err("no token may follow 7".into()) } else { Ok(Waltz::mask(Some(token))) }
    }

    fn fork(&self) -> Option<Box<dyn Matcher>> {
        Some(Box::new(self.clone()))
    }
}

/// A scheduler of one sequence with three drafts a step.
struct Alone(Scheduler);

impl Alone {
    fn new(max_tokens: usize) -> Self {
        let source = DraftSource::Host(Arc::new(Always));
        let config = SchedulerConfig {
            max_num_seqs: 1,
            max_num_batched_tokens: 64,
            max_num_mixed_tokens: 64,
            eos_token_ids: vec![EOS],
            speculation: Some(Speculation {
                num_tokens: 3,
                source,
                adaptive: false,
                draft_vocab_size: None,
                synthetic_acceptance_length: None,
            }),
            max_loras: 0,
        };
        let mut scheduler = Scheduler::new(config, BlockPool::new(8, 16), ());
        let grammar: Option<Arc<dyn Grammar>> = Some(Arc::new(NoSeven));
        scheduler.add(RequestId(0), GenerateRequest { grammar, ..GenerateRequest::greedy(vec![5; 20], max_tokens) });
        Self(scheduler)
    }

    /// The next step, once its masks are ready.
    fn plan(&mut self) -> Step {
        let (step, _) = self.0.plan(false);
        if !step.is_empty() {
            return step;
        }
        self.0.waiting_for_mask(None).expect("it waits for its mask").wait(Duration::from_secs(10));
        self.0.plan(false).0
    }

    /// Runs the next step, whose samples draw `drawn`; returns the accepted tokens and the grammar's error. `text`: the
    /// newest token and the drafts, none before the first step.
    fn step(&mut self, text: &[u32], drawn: &[u32]) -> (Vec<u32>, Option<String>) {
        let step = self.plan();
        let masks: Vec<_> = step.samples.iter().map(|sample| sample.logits_update.clone().unwrap().allowed).collect();
        if text.is_empty() {
            assert_eq!(masks, [Some(Waltz::mask(None))]);
        } else {
            assert_eq!(step.tokens, text);
            let expected: Vec<_> = text.iter().map(|token| Some(Waltz::mask(Some(*token)))).collect();
            assert_eq!(masks, expected, "the mask of each sample is the one after its own token");
        }
        let (tokens, logprobs) = (drawn.to_vec(), vec![None; drawn.len()]);
        let mut events = self.0.commit(&step, Outcome { tokens, logprobs, ..Outcome::default() });
        if let Some(grammar) = self.0.waiting_for_mask(None) {
            grammar.wait(Duration::from_secs(10));
            events.extend(self.0.fail_errored());
        }
        self.0.check_blocks().unwrap();
        outcome(events)
    }
}

/// The tokens of some events, and the error of the grammar.
fn outcome(events: EventBatch) -> (Vec<u32>, Option<String>) {
    let (mut tokens, mut failure) = (Vec::new(), None);
    for (_, event) in events {
        match event {
            TokenEvent::Token(token) => tokens.push(token.id),
            TokenEvent::GrammarFailed { error } => failure = Some(error),
            _ => {}
        }
    }
    (tokens, failure)
}

#[test]
fn drafts_end_where_the_grammar_does_not_allow_them_and_the_next_ones_follow_what_counts() {
    let mut alone = Alone::new(40);
    let counts = |tokens: &[u32]| (tokens.to_vec(), None);
    assert_eq!(alone.step(&[], &[3]), counts(&[3]));
    assert_eq!(alone.step(&[3, 1, 2], &[1, 2, 6]), counts(&[1, 2, 6]), "all are accepted");
    assert_eq!(alone.step(&[6, 1, 2], &[1, 9, 9]), counts(&[1, 9]), "the second one is refused");
    assert_eq!(alone.step(&[9, 1, 2], &[8, 9, 9]), counts(&[8]), "the first one is");
    assert_eq!(alone.step(&[8, 1, 2], &[1, 2, 4]), counts(&[1, 2, 4]));
    assert_eq!(alone.step(&[4], &[2]), counts(&[2]), "1 may not follow 4");
    let stats = alone.0.stats().speculation;
    assert_eq!((stats.drafts, stats.draft_tokens, stats.accepted_tokens()), (4, 8, 5));
    alone.0.cancel(RequestId(0));
    assert!(!alone.0.has_work());
}

#[test]
fn a_grammar_that_fails_behind_accepted_drafts_fails_after_all_of_them() {
    let mut alone = Alone::new(40);
    alone.step(&[], &[3]);
    let (tokens, failure) = alone.step(&[3, 1, 2], &[1, 2, 7]);
    assert_eq!((tokens, failure.as_deref()), (vec![1, 2, 7], Some("no token may follow 7")));
    assert!(!alone.0.has_work());
    assert_eq!(alone.0.stats().kv_blocks_free, 8);
}

#[test]
fn drafts_end_before_the_last_token_that_a_request_can_have() {
    let mut alone = Alone::new(3);
    alone.step(&[], &[3]);
    assert_eq!(alone.step(&[3, 1], &[1, 6]), (vec![1, 6], None));
    assert!(!alone.0.has_work());
}
