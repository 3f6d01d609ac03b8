//! The same request gives the same bits however it is scheduled: whole or in chunks, alone or in a batch, from a cold
//! or a warm prefix cache, preempted or not, with one or two steps in flight. Tokens and the bits of all reported log-probabilities are compared.
//!
//! On a GPU bits may differ as [`same`] says.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use pegainfer_core::engine::{FinishReason, GenerateRequest, StepEngine};
use pegainfer_core::rules::{LogitRules, RuleFields};
use pegainfer_core::sampling::SamplingParams;
use pegainfer_qwen3_4b::LoadOptions;
use support::{DRIFT, Output, Target, best, engine, fixture, greedy, options, run, same, targets};

/// The fixture's prompts, half of them sampled with a seed, and some random prompts of awkward lengths.
fn requests() -> Vec<GenerateRequest> {
    let mut requests: Vec<GenerateRequest> = fixture().cases.iter().map(|case| greedy(&case.prompt_ids, 24)).collect();
    let mut state = 1u64;
    for length in [1, 2, 15, 16, 17, 31, 33, 48, 63, 100] {
        let mut id = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32 % 4000
        };
        requests.push(greedy(&(0..length).map(|_| id()).collect::<Vec<_>>(), 20));
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

#[test]
fn bits_do_not_depend_on_scheduling() {
    let requests = requests();
    for target in targets() {
        let expected = alone(target, &requests);
        // Chunked, one after another.
        for budget in [1, 7, 16, 50] {
            let options = LoadOptions { max_num_seqs: 1, max_num_batched_tokens: budget, ..options() };
            let slow = budget == 1;
            let requests = if slow { &requests[12..] } else { &requests[..] };
            let expected = if slow { &expected[12..] } else { &expected[..] };
            let got = run(&mut engine(target, &options), requests);
            same(&format!("chunks of {budget}"), target, expected, &got);
        }
        // Together, then again with a warm cache.
        let mut batched = engine(target, &options());
        let copies: Vec<_> = requests.iter().cycle().take(32).cloned().collect();
        let expected_copies: Vec<_> = expected.iter().cycle().take(32).cloned().collect();
        same("batch of 32", target, &expected_copies, &run(&mut batched, &copies));
        let before = batched.stats().prefix_hits;
        same("warm prefix cache", target, &expected_copies, &run(&mut batched, &copies));
        assert!(batched.stats().prefix_hits > before + 1000, "the cache was not warm");
        for depth in [1, 2] {
            // Mixed steps: a budget that is smaller than the prompts together.
            let options_mixed = LoadOptions { max_num_batched_tokens: 48, ..options() };
            let mut mixed = engine(target, &options_mixed);
            mixed.set_depth(depth);
            same(&format!("mixed steps, depth {depth}"), target, &expected_copies, &run(&mut mixed, &copies));
            // A pool that holds little more than the longest request.
            let options_tiny =
                LoadOptions { kv_cache_bytes: Some(52 * 16 * 6144), max_num_batched_tokens: 64, ..options() };
            let mut preempting = engine(target, &options_tiny);
            preempting.set_depth(depth);
            same(&format!("preemption, depth {depth}"), target, &expected_copies, &run(&mut preempting, &copies));
            assert!(preempting.stats().preemptions > 0, "nothing was preempted");
        }
    }
}

/// A stop token that comes while a later step is in flight ends the text where it would end otherwise.
#[test]
fn a_stop_is_a_stop_with_a_step_in_flight() {
    let target = best();
    let mut requests = requests();
    let free = run(&mut engine(target, &options()), &requests);
    for (i, (request, output)) in requests.iter_mut().zip(&free).enumerate() {
        request.stop_token_ids = vec![output.ids()[i % 20]];
    }
    let mut overlapping = engine(target, &options());
    overlapping.set_depth(2);
    let stopped = run(&mut overlapping, &requests);
    for ((request, free), stopped) in requests.iter().zip(&free).zip(&stopped) {
        let (id, usage) = match stopped.end {
            Some((FinishReason::Stop(id), usage)) => (id, usage),
            // Another text that went past a close call.
            _ if target == Target::Cuda => continue,
            _ => panic!("{:?} did not stop", stopped.ids()),
        };
        assert_eq!(request.stop_token_ids, [id]);
        assert_eq!(usage.completion_tokens, stopped.tokens.len());
        let length = free.ids().iter().position(|other| *other == id).unwrap() + 1;
        let cut = Output { tokens: free.tokens[..length].to_vec(), ..Output::default() };
        let same_length = stopped.tokens.len() == length;
        assert!(target == Target::Cuda || (same_length && stopped.bits() == cut.bits()), "{:?}", stopped.ids());
    }
    let stats = overlapping.stats();
    assert_eq!((stats.running, stats.kv_blocks_free), (0, stats.kv_blocks_total));
}

#[test]
fn a_seed_names_the_draw() {
    let request = |seed| GenerateRequest {
        sampling: SamplingParams::new(1.2, 0, 1.0, 0.0, seed).unwrap(),
        ..greedy(&fixture().cases[0].prompt_ids, 24)
    };
    let mut engine = engine(best(), &options());
    let outputs = run(&mut engine, &[request(1), request(2), request(1)]);
    assert_eq!(outputs[0].bits(), outputs[2].bits());
    assert_ne!(outputs[0].ids(), outputs[1].ids());
}

/// A report about a prompt's token is what a request gets that draws this token after the same prefix.
#[test]
fn prompts_are_reported_as_if_they_were_drawn() {
    for target in targets() {
        let prompt = fixture().cases[0].prompt_ids.clone();
        let prefix = |length: usize| {
            let bias = [(prompt[length], 100.0)].into();
            let rules = LogitRules::new(RuleFields { logit_bias: bias, ..RuleFields::default() }, 4096).unwrap();
            GenerateRequest { rules, ..greedy(&prompt[..length], 1) }
        };
        let drawn = alone(target, &(1..prompt.len()).map(prefix).collect::<Vec<_>>());
        let whole = GenerateRequest { prompt_logprobs: Some(5), ..greedy(&prompt, 4) };
        let mut small = options();
        (small.max_num_seqs, small.max_num_batched_tokens) = (3, 7);
        for options in [options(), small] {
            let mut engine = engine(target, &options);
            // Once cold, once with a prefix that is in the cache; and others beside it.
            for _ in 0..2 {
                let outputs =
                    run(&mut engine, &[greedy(&prompt, 4), whole.clone(), greedy(&prompt[..9], 4), whole.clone()]);
                assert_eq!((&outputs[0].prompt, outputs[1].end.unwrap().1.cached_tokens), (&None, 0));
                assert!(target == Target::Cuda || outputs[1].bits() == outputs[0].bits());
                let reports = outputs[1].prompt.as_ref().unwrap();
                assert_eq!(reports.len(), prompt.len() - 1);
                for (report, output) in reports.iter().zip(&drawn) {
                    let expected = output.tokens[0].logprobs.as_ref().unwrap();
                    let close = (report.logprob - expected.logprob).abs() < DRIFT && report.top.len() == 5;
                    assert!(report == expected || (target == Target::Cuda && close), "{report:?} {expected:?}");
                }
                assert!(target == Target::Cuda || outputs[3].prompt == outputs[1].prompt);
            }
        }
    }
}
