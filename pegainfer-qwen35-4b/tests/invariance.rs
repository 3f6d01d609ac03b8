//! The same request gives the same bits however it is scheduled: whole or in chunks, alone or in a batch, from a cold
//! or a warm prefix cache, preempted or not, with one or two steps in flight. Tokens and the bits of all reported
//! log-probabilities are compared; on a GPU, where bits may differ, as [`same`] says.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use pegainfer_core::engine::{GenerateRequest, StepEngine};
use pegainfer_core::rules::{LogitRules, RuleFields};
use pegainfer_core::sampling::SamplingParams;
use pegainfer_qwen35_4b::LoadOptions;
use support::{Output, Target, best, engine, fixture, greedy, options, run, same};

/// The fixture's prompts, half of them sampled with a seed, and some random prompts of awkward lengths.
fn requests() -> Vec<GenerateRequest> {
    let mut requests: Vec<GenerateRequest> = fixture().cases.iter().map(|case| greedy(&case.prompt_ids, 24)).collect();
    let mut state = 1u64;
    for length in [1, 2, 3, 4, 15, 16, 17, 33, 64, 65, 130] {
        let mut id = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32 % 4000
        };
        requests.push(greedy(&(0..length).map(|_| id()).collect::<Vec<_>>(), 50));
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

fn alone(target: Target, requests: &[GenerateRequest]) -> Vec<Output> {
    let mut engine = engine(target, &options());
    requests
        .iter()
        .enumerate()
        .map(|(i, request)| {
            // A salt of its own: every request starts with a cold cache.
            let request = GenerateRequest { cache_salt: 1000 + i as u64, ..request.clone() };
            run(&mut engine, &[request]).remove(0)
        })
        .collect()
}

/// On the fastest instruction set: the tests of the ops say the same of each.
#[test]
fn bits_do_not_depend_on_chunks() {
    let (requests, target) = (requests(), best());
    let expected = alone(target, &requests);
    for (budget, first) in [(1, 12), (7, 0), (50, 0)] {
        let options = LoadOptions { max_num_seqs: 1, max_num_batched_tokens: budget, ..options() };
        let got = run(&mut engine(target, &options), &requests[first..]);
        same(&format!("chunks of {budget}"), target, &expected[first..], &got);
    }
}

#[test]
fn bits_do_not_depend_on_company_cache_or_preemption() {
    let (requests, target) = (requests(), best());
    let expected = alone(target, &requests);
    let copies: Vec<_> = requests.iter().cycle().take(32).cloned().collect();
    let expected: Vec<_> = expected.iter().cycle().take(32).cloned().collect();
    // Together, then again with a warm cache.
    let mut batched = engine(target, &options());
    same("batch of 32", target, &expected, &run(&mut batched, &copies));
    let before = batched.stats().prefix_hits;
    same("warm prefix cache", target, &expected, &run(&mut batched, &copies));
    assert!(batched.stats().prefix_hits > before + 1000, "the cache was not warm");
    for depth in [1, 2] {
        // Mixed steps: a budget that is smaller than the prompts together. Room for four copies.
        let few = LoadOptions { max_num_batched_tokens: 48, state_cache_bytes: Some(8_000_000), ..options() };
        let mut mixed = engine(target, &few);
        mixed.set_depth(depth);
        same(&format!("mixed steps, depth {depth}"), target, &expected, &run(&mut mixed, &copies));
        // A pool that holds little more than the longest request.
        let tiny = LoadOptions { kv_cache_bytes: Some(50 * 16 * 2048), max_num_batched_tokens: 64, ..options() };
        let mut preempting = engine(target, &tiny);
        preempting.set_depth(depth);
        same(&format!("preemption, depth {depth}"), target, &expected, &run(&mut preempting, &copies));
        assert!(preempting.stats().preemptions > 0, "nothing was preempted");
    }
}

/// Without room for copies there is no prefix cache, and nothing says otherwise.
#[test]
fn no_copies_no_hits() {
    let prompt = &fixture().cases[3].prompt_ids;
    let mut engine = engine(best(), &LoadOptions { state_cache_bytes: Some(0), ..options() });
    for _ in 0..2 {
        let output = run(&mut engine, &[greedy(prompt, 2)]).remove(0);
        assert_eq!(output.end.unwrap().1.cached_tokens, 0);
    }
    assert_eq!(engine.stats().prefix_hits, 0);
}

/// A prompt that was seen is found up to its last full block, one that only begins alike up to a copy before it ends.
#[test]
fn a_prefix_is_found_where_its_state_was_kept() {
    let prompt = &fixture().cases[3].prompt_ids;
    assert!(prompt.len() > 300);
    let mut engine = engine(best(), &LoadOptions { state_cache_interval: 64, ..options() });
    let mut cached = |prompt: &[u32]| run(&mut engine, &[greedy(prompt, 2)]).remove(0).end.unwrap().1.cached_tokens;
    assert_eq!(cached(&prompt[..300]), 0);
    assert_eq!(cached(&prompt[..300]), 288);
    assert_eq!(cached(&[&prompt[..280], &[7; 30]].concat()), 256);
    assert_eq!(cached(&prompt[..100]), 64);
    assert_eq!(cached(&prompt[..100]), 96);
}
