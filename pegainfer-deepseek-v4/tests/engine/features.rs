//! Request features and steps in flight, which the scheduler of pegainfer-core gives to every model.

use crate::support::invariance::{self, Alone};
use crate::support::{
    LoadOptions, THREE_PAGES, Target, e2e, engine, fixture, greedy, growing, logits, options, run, samples,
};
use pegainfer_core::engine::{GenerateRequest, RequestId, StepEngine, TokenEvent};
use pegainfer_core::grammar::{Grammar, Matcher};
use pegainfer_core::isa::Isa;
use pegainfer_core::logits_processors::TokenMask;
use pegainfer_core::schedule::PLACEHOLDER;
use pegainfer_deepseek_v4::numerics::Numerics;
use pegainfer_deepseek_v4::plan;
use std::sync::Arc;

/// A text with two whole pages.
fn text() -> Vec<u32> {
    let long = fixture().cases.into_iter().find(|case| case.name == "long_stories").unwrap();
    long.prompt_ids[..300].to_vec()
}

/// Prompts around the ends of pages, some of them sampled, some with logits processors.
#[test]
fn two_steps_in_flight_give_the_bits_of_one() {
    let mut requests = invariance::requests(&fixture().cases[..2], &[1, 127, 128, 129, 250], 12);
    requests.extend(growing(&text()));
    let base = options(Numerics::REFERENCE);
    let alone = Alone::new(&mut engine(1, &base), Target::Cpu(Isa::best()), requests);
    let mixed = LoadOptions { max_num_batched_tokens: Some(48), max_num_mixed_tokens: 40, ..base.clone() };
    let tight = LoadOptions { kv_cache_bytes: THREE_PAGES, ..mixed.clone() };
    alone.holds_mixed_and_preempted(|| engine(1, &mixed), || engine(1, &tight));
}

#[test]
fn the_engine_thread_stops_at_end_of_text_and_forgets_cancelled_requests() {
    e2e::stops_at_end_of_text_and_forgets_cancelled_requests(&fixture(), |_| engine(1, &options(Numerics::REFERENCE)));
}

#[test]
fn what_is_drawn_does_not_depend_on_what_else_is() {
    let wide = LoadOptions { max_num_seqs: Some(64), ..options(Numerics::REFERENCE) };
    let mut engine = engine(1, &wide);
    // Up to 32 samples: the output matrix of more has another order of sums on GPUs.
    for step in [plan::uniform(3, 10, 10), plan::uniform(4, 1, 1)] {
        samples::hold(Target::Cpu(Isa::best()), engine.executor(), &step);
    }
}

/// Placeholder ids stand for the tokens of the previous step.
#[test]
fn placeholder_ids_are_resolved_from_the_step_before() {
    let mut engine = engine(1, &options(Numerics::REFERENCE));
    let executor = engine.executor();
    let first = plan::uniform(3, 20, 20);
    let drawn = executor.run(&first).unwrap().tokens;
    let mut named = plan::uniform(3, 1, 21);
    for (token, sample) in named.tokens.iter_mut().zip([2, 0, 1]) {
        *token = PLACEHOLDER | sample;
    }
    let mut known = named.clone();
    known.tokens = [2, 0, 1].map(|sample: usize| drawn[sample]).to_vec();
    let expected = (executor.run(&known).unwrap(), executor.logits(3).unwrap());
    executor.run(&first).unwrap();
    assert_eq!((executor.run(&named).unwrap(), executor.logits(3).unwrap()), expected);
}

#[test]
fn prompt_logprobs_are_those_of_the_logits() {
    let text = &text()[..140];
    let rows = logits(&mut engine(1, &options(Numerics::REFERENCE)), text, 1024, 139);
    for max_num_seqs in [16, 3] {
        let mut engine = engine(1, &LoadOptions { max_num_seqs: Some(max_num_seqs), ..options(Numerics::REFERENCE) });
        let whole = GenerateRequest { prompt_logprobs: Some(2), ..greedy(text, 3) };
        let outputs = run(&mut engine, &[greedy(text, 3), whole.clone(), greedy(&text[..9], 3)]);
        assert_eq!(outputs[0].bits(), outputs[1].bits());
        assert_eq!((outputs[0].prompt.is_none(), outputs[1].end.unwrap().1.cached_tokens), (true, 0));
        let prompt = outputs[1].prompt.as_ref().unwrap();
        assert_eq!(prompt.len(), text.len() - 1);
        // The last rows of logits follow the tokens from the second on; each gives the token after it.
        for (i, found) in prompt.iter().enumerate().skip(1) {
            let row = &rows[i - 1];
            let expected = row[text[i + 1] as usize];
            assert!((found.logprob - expected).abs() < 1e-4, "token {i}: {} instead of {expected}", found.logprob);
            assert_eq!(found.top.len(), 2);
        }
    }
}

/// Even ids after odd ones, and odd ids after even ones.
#[derive(Debug)]
struct Alternating;

impl Alternating {
    fn mask(parity: u32) -> Arc<TokenMask> {
        Arc::new(TokenMask::new(&(0..4096).filter(|id| id % 2 == parity).collect::<Vec<_>>(), 4096))
    }
}

impl Grammar for Alternating {
    fn start(&self) -> (Box<dyn Matcher>, Arc<TokenMask>) {
        (Box::new(Self), Self::mask(0))
    }
}

impl Matcher for Alternating {
    fn next(&mut self, token: u32) -> Result<Arc<TokenMask>, String> {
        Ok(Self::mask(1 - token % 2))
    }
}

#[test]
fn a_grammar_holds_and_leaves_other_requests_alone() {
    let cases = fixture().cases;
    let prompt = &cases[1].prompt_ids;
    let plain = greedy(prompt, 16);
    let ruled = GenerateRequest { grammar: Some(Arc::new(Alternating)), ..plain.clone() };
    let mut alone = engine(1, &options(Numerics::REFERENCE));
    let expected = run(&mut alone, std::slice::from_ref(&plain)).remove(0);
    for depth in [1, 2] {
        let mut engine = engine(1, &options(Numerics::REFERENCE));
        engine.set_depth(depth);
        let outputs = run(&mut engine, &[ruled.clone(), plain.clone(), ruled.clone()]);
        assert_eq!(outputs[1].bits(), expected.bits());
        assert!(outputs[0].ids().iter().enumerate().all(|(i, id)| *id as usize % 2 == i % 2), "{:?}", outputs[0].ids());
        assert_ne!(outputs[0].ids(), expected.ids(), "the grammar changes nothing");
        assert_eq!(outputs[0].bits(), outputs[2].bits());
    }
}

#[test]
fn lower_priorities_run_first() {
    let mut engine = engine(1, &LoadOptions { max_num_seqs: Some(1), ..options(Numerics::REFERENCE) });
    for (id, priority) in [(0, 0), (1, 5), (2, -1), (3, 0)] {
        let request = GenerateRequest { priority, ..greedy(&text()[..20], 2) };
        engine.limits().check(&request).unwrap();
        engine.add(RequestId(id), request);
    }
    let mut order = Vec::new();
    while engine.has_work() {
        let events = match engine.plan() {
            Some(_) => engine.launch().map(|()| Vec::new()).unwrap(),
            None => engine.finish().unwrap(),
        };
        let finished = events.iter().filter(|(_, event)| matches!(event, TokenEvent::Finished { .. }));
        order.extend(finished.map(|(id, _)| id.0));
    }
    assert_eq!(order, [2, 0, 3, 1]);
}
