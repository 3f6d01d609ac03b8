//! A request gives the same bits however it is scheduled.

use super::{Case, Output, Target, greedy, run, with_logprobs};
use pegainfer_core::engine::{GenerateRequest, StepEngine, TokenLogprobs};
use pegainfer_core::logits_processors::{LogitsProcessorParams, LogitsProcessors};
use pegainfer_core::sampling::SamplingParams;
use pegainfer_core::schedule::{EngineCore, StepExecutor};

/// The prompts of `cases`, and random ones of `lengths`, for `max_tokens` tokens. Every other one is sampled with a
/// seed; every third has logits processors.
pub fn requests(cases: &[Case], lengths: &[usize], max_tokens: usize) -> Vec<GenerateRequest> {
    let mut requests: Vec<_> = cases.iter().map(|case| greedy(&case.prompt_ids, 24)).collect();
    let mut state = 1u64;
    for length in lengths {
        let mut id = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32 % 4000
        };
        requests.push(greedy(&(0..*length).map(|_| id()).collect::<Vec<_>>(), max_tokens));
    }
    for (i, request) in requests.iter_mut().enumerate() {
        if i % 2 == 1 {
            request.sampling = SamplingParams::new(0.9, 40, 0.95, 0.01, i as u64).unwrap();
        }
        if i % 3 == 1 {
            request.logits_processors = LogitsProcessors::new(params(i), 4096).unwrap();
        }
    }
    requests
}

/// Penalties, bans and masks in turn; some need to know the newest token, some do not.
fn params(i: usize) -> LogitsProcessorParams {
    let default = LogitsProcessorParams::default();
    match i % 4 {
        0 => LogitsProcessorParams { repetition_penalty: 1.5, bad_words: vec![vec![264, 5], vec![13]], ..default },
        1 => LogitsProcessorParams { presence_penalty: 1.0, frequency_penalty: 1.0, ..default },
        2 => LogitsProcessorParams { allowed_token_ids: Some((0..4096).filter(|id| id % 2 == 0).collect()), ..default },
        _ => {
            LogitsProcessorParams { min_tokens: 10, stops: vec![13, 4089], logit_bias: [(11, -3.0)].into(), ..default }
        }
    }
}

/// Requests with log-probabilities, and the result of each alone with a cold prefix cache.
pub struct Alone {
    target: Target,
    pub(super) requests: Vec<GenerateRequest>,
    pub outputs: Vec<Output>,
    /// Nats by which a log-probability may differ on a GPU.
    pub drift: f32,
}

impl Alone {
    /// Runs one request after another, each with log-probabilities.
    pub fn new(engine: &mut impl StepEngine, target: Target, requests: Vec<GenerateRequest>) -> Self {
        let requests: Vec<_> = requests.into_iter().map(with_logprobs).collect();
        // A different salt for each request, so that it starts with a cold cache.
        let cold = |(i, request): (usize, &GenerateRequest)| GenerateRequest {
            cache_salt: 1000 + i as u64,
            ..request.clone()
        };
        let outputs = requests.iter().enumerate().map(|request| run(engine, &[cold(request)]).remove(0)).collect();
        Self { target, requests, outputs, drift: DRIFT }
    }

    /// Without the first `n` requests.
    pub fn skip(&self, n: usize) -> Self {
        let (requests, outputs) = (self.requests[n..].to_vec(), self.outputs[n..].to_vec());
        Self { requests, outputs, ..*self }
    }

    /// `n` requests: these, from the first again after the last.
    pub fn cycle(&self, n: usize) -> Self {
        let requests = self.requests.iter().cycle().take(n).cloned().collect();
        let outputs = self.outputs.iter().cycle().take(n).cloned().collect();
        Self { requests, outputs, ..*self }
    }

    /// Checks that all requests submitted at once give the same results as alone.
    pub fn holds(&self, what: &str, engine: &mut impl StepEngine) {
        same_within(self.drift, what, self.target, &self.requests, &self.outputs, &run(engine, &self.requests));
    }

    /// Variant of [`holds`](Self::holds) for the tokens alone: no request asks for log-probabilities, so a GPU replays
    /// graphs.
    pub fn holds_without_logprobs(&self, what: &str, engine: &mut impl StepEngine) {
        let plain = |request: &GenerateRequest| GenerateRequest { logprobs: None, ..request.clone() };
        let requests: Vec<_> = self.requests.iter().map(plain).collect();
        same_within(self.drift, what, self.target, &requests, &self.outputs, &run(engine, &requests));
    }

    /// Together, then again with a warm cache, with log-probabilities and without.
    pub fn holds_cold_and_warm(&self, engine: &mut impl StepEngine) {
        self.holds("together", engine);
        let before = engine.stats().prefix_hits;
        self.holds("warm prefix cache", engine);
        assert!(engine.stats().prefix_hits > before + 1000, "the cache was not warm");
        self.holds_without_logprobs("warm prefix cache, no log-probabilities", engine);
    }

    /// Checks with one or two steps in flight, on `mixed`, whose budget is smaller than the prompts together, and on
    /// `tight`, whose pool holds little more than the longest request.
    pub fn holds_mixed_and_preempted<E: StepExecutor>(
        &self,
        mixed: impl Fn() -> EngineCore<E>,
        tight: impl Fn() -> EngineCore<E>,
    ) {
        for depth in [1, 2] {
            let mut mixed = mixed();
            mixed.set_depth(depth);
            self.holds(&format!("mixed steps, depth {depth}"), &mut mixed);
            drop(mixed);
            let mut preempting = tight();
            preempting.set_depth(depth);
            self.holds(&format!("preemption, depth {depth}"), &mut preempting);
            assert!(preempting.stats().preemptions > 0, "nothing was preempted");
        }
    }
}

/// Nats by which a log-probability may differ on a GPU, because bf16 activations round differently.
pub const DRIFT: f32 = 0.25;
/// Number of first tokens of each request, half of which must agree on a GPU.
const FIRST: usize = 8;

/// On the CPU: same tokens, and same bits of log-probabilities if `requests` ask for them. On a GPU, where the order of
/// sums depends on the batch: within the bounds of [`close`], and half of the [`FIRST`] tokens of greedy and of sampled
/// requests. A text that diverges at a close call does not converge again, but most do not diverge so early.
pub fn same(what: &str, target: Target, requests: &[GenerateRequest], expected: &[Output], got: &[Output]) {
    same_within(DRIFT, what, target, requests, expected, got);
}

/// [`same`] with another bound than [`DRIFT`].
fn same_within(
    drift: f32,
    what: &str,
    target: Target,
    requests: &[GenerateRequest],
    expected: &[Output],
    got: &[Output],
) {
    let mut tallies = [("greedy", 0, 0), ("sampled", 0, 0)];
    assert_eq!((requests.len(), requests.len()), (expected.len(), got.len()), "{what}");
    for (i, ((request, expected), got)) in requests.iter().zip(expected).zip(got).enumerate() {
        if target == Target::Cuda {
            let agreed = close(drift, &format!("{what}: request {i}"), request, expected, got);
            let (_, first, of) = &mut tallies[usize::from(!request.sampling.is_greedy())];
            (*first, *of) = (*first + agreed.min(FIRST), *of + expected.tokens.len().min(FIRST));
            continue;
        }
        let bits = request.logprobs.is_none() || expected.bits() == got.bits();
        let same = bits && expected.ids() == got.ids();
        assert!(same, "{target}, {what}: request {i} gave\n{got:?}\nbut alone\n{expected:?}");
    }
    for (kind, agreed, of) in tallies {
        assert!(2 * agreed >= of, "{what}: only {agreed} of the first {of} tokens of {kind} requests agree");
    }
}

/// Number of leading tokens of `got` that equal `expected`, which has log-probabilities. On a GPU, log-probabilities up
/// to there must be within `most`, and so must the two distributions at the first different token. A greedy token without
/// logits processors may differ only if the two most likely ones are closer than that; a sampled one may differ wherever
/// its random number falls between two tokens.
fn close(most: f32, what: &str, request: &GenerateRequest, expected: &Output, got: &Output) -> usize {
    assert_eq!(expected.tokens.len(), got.tokens.len(), "{what}");
    for (i, (e, g)) in expected.tokens.iter().zip(&got.tokens).enumerate() {
        let (own, other) = (e.logprobs.as_ref().unwrap(), g.logprobs.as_ref());
        if e.id != g.id {
            let ruled = request.logits_processors.is_some() || request.grammar.is_some();
            let decided = request.sampling.is_greedy() && !ruled;
            let gap = own.top[0].1 - own.top[1].1;
            assert!(!decided || gap < most, "{what}, token {i}: {} instead of {}, {gap} nats apart", g.id, e.id);
            let drift = other.map_or(0.0, |other| drift_of_the_best(own, other));
            assert!(drift <= most, "{what}, token {i}: the most likely token moved by {drift}");
            return i;
        }
        let drift = other.map_or(0.0, |other| (own.logprob - other.logprob).abs());
        assert!(drift <= most, "{what}, token {i}: the log-probability moved by {drift}");
    }
    expected.tokens.len()
}

/// Nats by which the most likely token of `own` moved in `other`; a lower bound if `other` does not report it.
fn drift_of_the_best(own: &TokenLogprobs, other: &TokenLogprobs) -> f32 {
    let (id, logprob) = own.top[0];
    let least = other.top[other.top.len() - 1].1;
    other.top.iter().find(|(other, _)| *other == id).map_or(logprob - least, |(_, other)| (logprob - other).abs())
}
