//! Drafts change no bit.

use super::invariance::{Alone, same};
use super::{Output, Target, greedy, run, with_logprobs};
use pegainfer_core::engine::{GenerateRequest, SpeculationStats, StepEngine};
use pegainfer_core::grammar::{Grammar, Matcher};
use pegainfer_core::logits_processors::{LogitsProcessorParams, LogitsProcessors, TokenMask};
use pegainfer_core::schedule::speculation::{
    DraftMethod, DraftSource, Drafter, ModelMethod, PromptLookup, Speculation, Suffix,
};
use pegainfer_core::schedule::{EngineCore, StepExecutor};
use std::sync::Arc;

/// Drafts known texts, with an error at every `wrong`-th place.
#[derive(Debug, Clone)]
struct Oracle {
    texts: Arc<[Vec<u32>]>,
    wrong: usize,
}

impl DraftMethod for Oracle {
    fn start(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}

impl Drafter for Oracle {
    fn propose(&mut self, tokens: &[u32], max_drafts: usize) -> Vec<u32> {
        let Some(text) = self.texts.iter().find(|text| text.starts_with(tokens)) else { return Vec::new() };
        let places = tokens.len()..text.len().min(tokens.len() + max_drafts);
        places.map(|place| if place.is_multiple_of(self.wrong) { 1 } else { text[place] }).collect()
    }
}

fn speculation(num_tokens: usize, method: impl DraftMethod + 'static) -> Option<Speculation> {
    Some(Speculation {
        num_tokens,
        source: DraftSource::Host(Arc::new(method)),
        adaptive: false,
        draft_vocab_size: None,
        synthetic_acceptance_length: None,
    })
}

/// Drafts from `texts`, all of which are verified.
pub fn oracle(num_tokens: usize, texts: Vec<Vec<u32>>) -> Option<Speculation> {
    oracle_with_errors(num_tokens, texts, usize::MAX)
}

/// Variant of [`oracle`] that drafts every `wrong`-th token of a text wrongly.
pub fn oracle_with_errors(num_tokens: usize, texts: Vec<Vec<u32>>, wrong: usize) -> Option<Speculation> {
    speculation(num_tokens, Oracle { texts: texts.into(), wrong })
}

/// Drafts by the model's layers for multi-token prediction, all of which are verified.
pub fn by_model(num_tokens: usize) -> Option<Speculation> {
    by(ModelMethod::Mtp, num_tokens)
}

/// Drafts by the model itself, all of which are verified.
pub fn by(method: ModelMethod, num_tokens: usize) -> Option<Speculation> {
    let source = DraftSource::Model(method);
    Some(Speculation { num_tokens, source, adaptive: false, draft_vocab_size: None, synthetic_acceptance_length: None })
}

impl Alone {
    /// Checks with drafts of the model, some of which are right: together, and from a warm cache. Returns the
    /// preemptions.
    pub fn holds_with_drafts_of_the_model<E: StepExecutor>(&self, what: &str, drafting: &mut EngineCore<E>) -> u64 {
        self.holds(what, drafting);
        self.holds_without_logprobs(&format!("{what}, warm prefix cache"), drafting);
        assert_drafted(&drafting.stats().speculation, self.requests.len());
        drafting.stats().preemptions
    }

    /// Checks with drafts of many lengths, most of which are right, with one or two steps in flight: together, from a
    /// warm cache, and preempted on the pool of `tight`, which holds little more than the longest request.
    pub fn holds_with_drafts<E: StepExecutor>(
        &self,
        engine: impl Fn(Option<Speculation>) -> EngineCore<E>,
        tight: impl Fn(Option<Speculation>) -> EngineCore<E>,
    ) {
        let texts: Arc<[Vec<u32>]> =
            self.requests.iter().zip(&self.outputs).map(|(request, output)| text(request, output)).collect();
        let run = |num_tokens, wrong, depth, make: &dyn Fn(Option<Speculation>) -> EngineCore<E>| {
            let what = format!("{num_tokens} drafts, every {wrong}th one wrong, depth {depth}");
            let mut drafting = make(speculation(num_tokens, Oracle { texts: texts.clone(), wrong }));
            drafting.set_depth(depth);
            self.holds(&what, &mut drafting);
            self.holds_without_logprobs(&format!("{what}, warm prefix cache"), &mut drafting);
            assert_drafted(&drafting.stats().speculation, self.requests.len());
            drafting.stats().preemptions
        };
        run(4, 6, 2, &engine);
        run(7, 100_000, 1, &engine);
        assert!(run(1, 2, 2, &tight) > 0, "nothing was preempted");
    }
}

/// Prompt and generated tokens.
fn text(request: &GenerateRequest, output: &Output) -> Vec<u32> {
    [&*request.prompt, &output.ids()].concat()
}

/// Checks that of the drafts of `requests` requests at least one per request was accepted and one refused.
fn assert_drafted(stats: &SpeculationStats, requests: usize) {
    let accepted = stats.accepted_tokens();
    assert!(accepted >= requests as u64, "too few drafts are accepted: {stats:?}");
    assert!(stats.draft_tokens >= accepted && stats.drafts > 0, "{stats:?}");
}

/// Checks the drafting methods available to users on a text that repeats itself: fewer steps and the same tokens; on a
/// GPU target, up to the first close call ([`same`]).
pub fn lookup_drafts_change_no_token<E: StepExecutor>(
    target: Option<Target>,
    engine: impl Fn(Option<Speculation>) -> EngineCore<E>,
) {
    let phrase: Vec<u32> = (0..24).map(|i| 300 + i * i % 97).collect();
    let request = greedy(&phrase.repeat(4), 96);
    let mut plain = engine(None);
    let expected = run(&mut plain, &[with_logprobs(request.clone())]);
    let ngram = speculation(4, PromptLookup { ngram: 2..=4 });
    let suffix = speculation(8, Suffix { max_match: 16, max_factor: 1.0, min_probability: 0.1 });
    for speculation in [ngram, suffix] {
        let name = format!("{speculation:?}");
        let mut drafting = engine(speculation);
        let requests = std::slice::from_ref(&request);
        let got = run(&mut drafting, requests);
        match target {
            Some(target) => same(&name, target, requests, &expected, &got),
            None => assert_eq!(got[0].ids(), expected[0].ids(), "{name}"),
        }
        let (steps, stats) = (drafting.stats().steps, drafting.stats().speculation);
        assert!(steps < plain.stats().steps && stats.accepted_tokens() > 0, "{name}: {steps} steps, {stats:?}");
    }
}

/// `requests`, every other one limited to few different tokens, so that a layer that drafts the previous token is
/// sometimes right.
pub fn few_tokens(mut requests: Vec<GenerateRequest>) -> Vec<GenerateRequest> {
    for (i, request) in requests.iter_mut().enumerate().filter(|(i, _)| i % 2 == 0) {
        let allowed_token_ids = Some((0..1 + i as u32 / 2 % 3).map(|id| 300 + 41 * id).collect());
        let params = LogitsProcessorParams { allowed_token_ids, ..LogitsProcessorParams::default() };
        request.logits_processors = LogitsProcessors::new(params, 4096).unwrap();
    }
    requests
}

/// A grammar of texts of three tokens that never repeats 300.
#[derive(Debug)]
pub struct Three;

impl Three {
    fn mask(last: Option<u32>) -> Arc<TokenMask> {
        let ids: Vec<u32> = [300, 341, 382].into_iter().filter(|id| *id != 300 || last != Some(300)).collect();
        Arc::new(TokenMask::new(&ids, 4096))
    }
}

impl Grammar for Three {
    fn start(&self) -> (Box<dyn Matcher>, Arc<TokenMask>) {
        (Box::new(Self), Self::mask(None))
    }
}

impl Matcher for Three {
    fn next(&mut self, token: u32) -> Result<Arc<TokenMask>, String> {
        Ok(Self::mask(Some(token)))
    }

    fn fork(&self) -> Option<Box<dyn Matcher>> {
        Some(Box::new(Self))
    }
}

/// Drafts of the model under a grammar change nothing that [`same`] compares on `target`, and some are accepted.
pub fn drafts_of_the_model_follow_a_grammar<E: StepExecutor>(
    target: Target,
    requests: Vec<GenerateRequest>,
    engine: impl Fn(Option<Speculation>) -> EngineCore<E>,
) {
    let ruled = |request: GenerateRequest| GenerateRequest {
        grammar: Some(Arc::new(Three)),
        logits_processors: None,
        prompt_logprobs: None,
        logprobs: Some(2),
        ..request
    };
    let requests: Vec<_> = requests.into_iter().map(ruled).collect();
    let run_with = |speculation| {
        let mut engine = engine(speculation);
        let outputs = run(&mut engine, &requests);
        (outputs, engine.stats().speculation)
    };
    let ((expected, _), (got, stats)) = (run_with(None), run_with(by_model(3)));
    same("drafts under a grammar", target, &requests, &expected, &got);
    assert!(stats.draft_tokens > 0 && stats.accepted_tokens() > 0, "{stats:?}");
}
