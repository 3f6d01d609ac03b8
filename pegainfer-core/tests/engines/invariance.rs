//! The same request gives the same bits however it is scheduled.

use super::{Case, Output, Target, greedy, run};
use pegainfer_core::engine::{GenerateRequest, StepEngine};
use pegainfer_core::rules::{LogitRules, RuleFields};
use pegainfer_core::sampling::SamplingParams;
use pegainfer_core::schedule::{EngineCore, StepExecutor};

/// The prompts of `cases`, and random ones of `lengths` that go on for `max_tokens`; every other one is sampled with a seed,
/// every third has rules.
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
            request.rules = LogitRules::new(rules(i), 4096).unwrap();
        }
    }
    requests
}

/// Penalties, bans and masks in turn; some need to know the newest token, some do not.
fn rules(i: usize) -> RuleFields {
    let default = RuleFields::default();
    match i % 4 {
        0 => RuleFields { repetition_penalty: 1.5, bad_words: vec![vec![264, 5], vec![13]], ..default },
        1 => RuleFields { presence_penalty: 1.0, frequency_penalty: 1.0, ..default },
        2 => RuleFields { allowed_token_ids: Some((0..4096).filter(|id| id % 2 == 0).collect()), ..default },
        _ => RuleFields { min_tokens: 10, stops: vec![13, 4089], logit_bias: [(11, -3.0)].into(), ..default },
    }
}

/// Requests, and what each gives alone with a cold prefix cache.
pub struct Alone {
    target: Target,
    requests: Vec<GenerateRequest>,
    pub outputs: Vec<Output>,
}

impl Alone {
    /// Runs one request after another.
    pub fn new(engine: &mut impl StepEngine, target: Target, requests: Vec<GenerateRequest>) -> Self {
        // A salt of its own: every request starts with a cold cache.
        let cold = |(i, request): (usize, &GenerateRequest)| GenerateRequest {
            cache_salt: 1000 + i as u64,
            ..request.clone()
        };
        let outputs = requests.iter().enumerate().map(|request| run(engine, &[cold(request)]).remove(0)).collect();
        Self { target, requests, outputs }
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

    /// All submitted at once give what they give alone.
    pub fn holds(&self, what: &str, engine: &mut impl StepEngine) {
        same(what, self.target, &self.outputs, &run(engine, &self.requests));
    }

    /// Together, then again with a warm cache.
    pub fn holds_cold_and_warm(&self, engine: &mut impl StepEngine) {
        self.holds("together", engine);
        let before = engine.stats().prefix_hits;
        self.holds("warm prefix cache", engine);
        assert!(engine.stats().prefix_hits > before + 1000, "the cache was not warm");
    }

    /// With one or two steps in flight: on `mixed`, whose budget is smaller than the prompts together, and on `tight`, whose
    /// pool holds little more than the longest request.
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

/// Nats by which a log-probability may move on a GPU, from bf16 activations that round the other way.
pub const DRIFT: f32 = 0.25;

/// The same tokens and bits; on a GPU, where the order of sums depends on the batch, the same text up to a token that was
/// a close call, and log-probabilities up to there within [`DRIFT`].
fn same(what: &str, target: Target, expected: &[Output], got: &[Output]) {
    for (i, (expected, got)) in expected.iter().zip(got).enumerate() {
        if target == Target::Cuda {
            close(&format!("{what}: request {i}"), expected, got);
            continue;
        }
        assert!(expected.bits() == got.bits(), "{target}, {what}: request {i} gave\n{got:?}\nbut alone\n{expected:?}");
    }
}

/// The rule of a GPU. A sampled row may leave the text wherever its random number falls between two tokens.
fn close(what: &str, expected: &Output, got: &Output) {
    assert_eq!(expected.tokens.len(), got.tokens.len(), "{what}");
    for (i, (e, g)) in expected.tokens.iter().zip(&got.tokens).enumerate() {
        let (own, other) = (e.logprobs.as_ref().unwrap(), g.logprobs.as_ref().unwrap());
        if e.id != g.id {
            let greedy = own.rank == 1 && other.rank == 1;
            let gap = own.top[0].1 - own.top[1].1;
            assert!(!greedy || gap < DRIFT, "{what}, token {i}: {} instead of {}, {gap} nats apart", g.id, e.id);
            return;
        }
        let drift = (own.logprob - other.logprob).abs();
        assert!(drift <= DRIFT, "{what}, token {i}: the log-probability moved by {drift}");
    }
}
