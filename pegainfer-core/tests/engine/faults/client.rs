//! A request, the stream of its client, and the expected contents of the stream.

use crate::requests::{Rng, Waltz, continuation, random_params, random_request};
use pegainfer_core::engine::{EngineLimits, FinishReason, GenerateRequest, TokenEvent, TokenStream};
use pegainfer_core::grammar::{Grammar, Matcher};
use pegainfer_core::logits_processors::{LogitsProcessors, TokenMask};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

/// A grammar that fails after a given number of tokens.
#[derive(Debug, Clone)]
struct Broken {
    after: usize,
}

impl Grammar for Broken {
    fn start(&self) -> (Box<dyn Matcher>, Arc<TokenMask>) {
        (Box::new(self.clone()), Waltz::mask(None))
    }
}

impl Matcher for Broken {
    fn next(&mut self, token: u32) -> Result<Arc<TokenMask>, String> {
        self.after -= 1;
        if self.after == 0 { Err("broken".into()) } else { Ok(Waltz::mask(Some(token))) }
    }

    fn fork(&self) -> Option<Box<dyn Matcher>> {
        Some(Box::new(self.clone()))
    }
}

/// A request and the tokens that it generates when it runs alone.
#[derive(Clone)]
pub struct Work {
    pub request: GenerateRequest,
    /// Expected tokens, up to the one after which its grammar fails.
    expected: Arc<[u32]>,
    /// True if the grammar fails after them.
    breaks: bool,
}

impl Work {
    /// Random work; `None` if the engine must refuse it, which is checked.
    pub fn new(rng: &mut Rng, limits: &EngineLimits, scale: usize, broken: bool) -> Option<Self> {
        let mut request = random_request(rng, limits, scale);
        let params = random_params(rng, &request);
        request.logits_processors = LogitsProcessors::new(params.clone(), limits.vocab_size).unwrap();
        let after = 1 + rng.below(12);
        if params.allowed_token_ids.is_none() && rng.chance(10) {
            request.grammar = Some(if broken { Arc::new(Broken { after }) } else { Arc::new(Waltz) });
        }
        limits.check(&request).ok()?;
        let mut expected = continuation(&request, &params);
        let breaks = request.grammar.is_some() && broken && expected.len() > after;
        if breaks {
            expected.truncate(after);
        }
        Some(Self { request, expected: expected.into(), breaks })
    }
}

/// Reading behaviour of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    AtOnce,
    /// An event now and then.
    Slow,
    /// Reads nothing before the engine is done.
    Stalled,
}

/// End of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Ended with its last event.
    Finished,
    /// Ended by a failed step.
    Failed,
    /// Without an event, as its deadline passed.
    Closed,
}

/// A client of the engine.
pub struct Client {
    pub stream: TokenStream,
    work: Work,
    pub pace: Pace,
    pub deadline: Option<Instant>,
    /// Steps that had failed by chance when it submitted.
    pub failures_before: u64,
    /// The device refuses to compute its tokens from this position on.
    refused_from: Option<usize>,
    pub got: usize,
    admitted: bool,
    prompt_reported: bool,
    end: Option<End>,
}

impl Client {
    pub fn new(
        stream: TokenStream,
        work: Work,
        pace: Pace,
        (failures_before, refused_from): (u64, Option<usize>),
    ) -> Self {
        let prompt_reported = work.request.prompt_logprobs.is_none();
        let (deadline, got, admitted, end) = (None, 0, false, None);
        Self { stream, work, pace, deadline, failures_before, refused_from, got, admitted, prompt_reported, end }
    }

    /// The request.
    pub fn request(&self) -> &GenerateRequest {
        &self.work.request
    }

    /// Sets a deadline; only the first one counts.
    pub fn cancel_at(&mut self, deadline: Instant) {
        self.stream.cancel_at(deadline);
        self.deadline.get_or_insert(deadline);
    }

    /// Reads up to `max_tokens` queued events at `now`, after `failures` steps that failed by chance; returns how the
    /// stream ended, once it is closed.
    pub fn read(&mut self, max_tokens: usize, now: Instant, failures: u64) -> Option<End> {
        for _ in 0..max_tokens {
            let before = self.stream.at();
            let next = pin!(self.stream.recv()).poll(&mut Context::from_waker(Waker::noop()));
            let event = match next {
                Poll::Pending => return None,
                Poll::Ready(Some(event)) => event,
                Poll::Ready(None) => {
                    let due = self.deadline.is_some_and(|deadline| deadline <= now);
                    assert!(self.end.is_some() || due, "{:?} closed without an end", self.stream.id());
                    return Some(self.end.unwrap_or(End::Closed));
                }
            };
            assert!(before <= self.stream.at() && self.stream.at() <= now, "time runs backwards");
            assert_eq!(self.end, None, "{:?} got {event:?} after its end", self.stream.id());
            self.take(event, failures);
        }
        None
    }

    fn take(&mut self, event: TokenEvent, failures: u64) {
        let Work { request, expected, breaks } = &self.work;
        let id = self.stream.id();
        match event {
            TokenEvent::Admitted { cached_tokens } => {
                assert!(!std::mem::replace(&mut self.admitted, true), "{id:?} is admitted twice");
                assert!(cached_tokens < request.prompt.len());
            }
            TokenEvent::Prompt(logprobs) => {
                assert!(self.got == 0 && !std::mem::replace(&mut self.prompt_reported, true));
                let reported = logprobs.iter().map(|logprobs| logprobs.logprob as u32);
                assert!(reported.eq(request.prompt[1..].iter().copied()), "{id:?} has those of another prompt");
            }
            TokenEvent::Vector(_) => panic!("{id:?} wants no vector"),
            TokenEvent::Token(token) => {
                assert!(self.admitted && self.prompt_reported, "{id:?} has a token too early");
                assert_eq!(Some(&token.id), expected.get(self.got), "{id:?} got a wrong token {}", self.got);
                self.got += 1;
                let position = request.prompt.len() + self.got - 1;
                assert!(self.refused_from.is_none_or(|from| position <= from), "{id:?} has a token of a refused row");
            }
            TokenEvent::Finished { reason, usage } => {
                assert!(self.got == expected.len() && !breaks, "{id:?} ended early");
                assert_eq!((usage.completion_tokens, usage.prompt_tokens), (self.got, request.prompt.len()));
                assert!(reason == FinishReason::Length || reason == FinishReason::Stop(expected[self.got - 1]));
                self.end = Some(End::Finished);
            }
            TokenEvent::GrammarFailed { .. } => {
                assert!(self.got == expected.len() && *breaks, "{id:?} has a grammar that can be followed");
                self.end = Some(End::Finished);
            }
            TokenEvent::Failed { .. } => {
                let to_blame = self.refused_from.is_some() || failures > self.failures_before;
                assert!(to_blame, "{id:?} failed because of another request");
                self.end = Some(End::Failed);
            }
        }
    }
}
