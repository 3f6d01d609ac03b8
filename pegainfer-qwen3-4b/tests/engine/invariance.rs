//! A request gives the same bits however it is scheduled: whole or in chunks, alone or in a batch, from a cold or a
//! warm prefix cache, preempted or not, with one or two steps in flight. Tokens and bits of all reported
//! log-probabilities are compared; a GPU follows the rule of [`crate::support::invariance`].

use crate::support::distribution::samples_follow_their_probabilities as samples_follow;
use crate::support::invariance::{Alone, DRIFT};
use crate::support::speculation::lookup_drafts_change_no_token;
use crate::support::{Output, Target, best, engine, fixture, greedy, options, requests, run, targets, with_logprobs};
use pegainfer_core::engine::{FinishReason, GenerateRequest, StepEngine};
use pegainfer_core::logits_processors::{LogitsProcessorParams, LogitsProcessors};
use pegainfer_core::sampling::SamplingParams;
use pegainfer_runtime::LoadOptions;

/// Runs on the fastest instruction set.
#[test]
fn bits_do_not_depend_on_scheduling() {
    let alone = Alone::new(&mut engine(best(), &options()), best(), requests());
    // One after another; only the short ones token by token, and in chunks of a block.
    for (budget, first) in [(1, 12), (7, 0), (16, 12), (50, 0)] {
        let options = LoadOptions { max_num_seqs: Some(1), max_num_batched_tokens: Some(budget), ..options() };
        alone.skip(first).holds(&format!("chunks of {budget}"), &mut engine(best(), &options));
    }
    let many = alone.cycle(32);
    many.holds_cold_and_warm(&mut engine(best(), &options()));
    let mixed = LoadOptions { max_num_batched_tokens: Some(48), ..options() };
    let tight = LoadOptions { kv_cache_bytes: Some(52 * 16 * 6144), max_num_batched_tokens: Some(64), ..options() };
    many.holds_mixed_and_preempted(|| engine(best(), &mixed), || engine(best(), &tight));
}

/// Slower instruction sets have other kernels under the same scheduler, so short requests in chunks and batches are
/// enough.
#[test]
fn bits_do_not_depend_on_batches_for_slower_instruction_sets() {
    for target in targets().into_iter().filter(|target| *target != best()) {
        let short = requests().split_off(fixture().cases.len());
        let alone = Alone::new(&mut engine(target, &options()), target, short);
        let mixed = LoadOptions { max_num_batched_tokens: Some(48), ..options() };
        alone.holds("mixed steps", &mut engine(target, &mixed));
    }
}

/// Runs on the fastest instruction set; the op tests cover the others.
#[test]
fn drafts_change_no_bit() {
    let tight = LoadOptions { kv_cache_bytes: Some(52 * 16 * 6144), max_num_batched_tokens: Some(64), ..options() };
    let with = |options: &LoadOptions, speculation| engine(best(), &LoadOptions { speculation, ..options.clone() });
    let alone = Alone::new(&mut engine(best(), &options()), best(), requests());
    alone.cycle(32).holds_with_drafts(|drafts| with(&options(), drafts), |drafts| with(&tight, drafts));
    lookup_drafts_change_no_token(Some(best()), |drafts| with(&options(), drafts));
}

/// A stop token that is drawn while a later step is in flight ends the text at the same place.
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
    let requests = [1, 2, 1].map(request);
    for requests in [requests.clone().map(with_logprobs), requests] {
        let outputs = run(&mut engine, &requests);
        assert_eq!(outputs[0].bits(), outputs[2].bits());
        assert_ne!(outputs[0].ids(), outputs[1].ids());
    }
}

#[test]
fn samples_follow_their_probabilities() {
    samples_follow(&mut engine(best(), &options()), &fixture().cases);
}

/// The report about a prompt token equals that of a request that draws this token after the same prefix.
#[test]
fn prompts_are_reported_as_if_they_were_drawn() {
    for target in targets() {
        let prompt = fixture().cases[0].prompt_ids.clone();
        let prefix = |length: usize| {
            let bias = [(prompt[length], 100.0)].into();
            let logits_processors = LogitsProcessors::new(
                LogitsProcessorParams { logit_bias: bias, ..LogitsProcessorParams::default() },
                4096,
            )
            .unwrap();
            GenerateRequest { logits_processors, ..greedy(&prompt[..length], 1) }
        };
        let prefixes = (1..prompt.len()).map(prefix).collect();
        let drawn = Alone::new(&mut engine(target, &options()), target, prefixes).outputs;
        let whole = GenerateRequest { prompt_logprobs: Some(5), ..with_logprobs(greedy(&prompt, 4)) };
        let plain = with_logprobs(greedy(&prompt, 4));
        let mut small = options();
        (small.max_num_seqs, small.max_num_batched_tokens) = (Some(3), Some(7));
        for options in [options(), small] {
            let mut engine = engine(target, &options);
            // Once with a cold cache, once with a cached prefix; and next to other requests.
            for _ in 0..2 {
                let requests = [plain.clone(), whole.clone(), greedy(&prompt[..9], 4), whole.clone()];
                let outputs = run(&mut engine, &requests);
                assert_eq!((&outputs[0].prompt, outputs[1].end.unwrap().1.cached_tokens), (&None, 0));
                assert!(target == Target::Cuda || outputs[1].bits() == outputs[0].bits());
                let reports = outputs[1].prompt.as_ref().unwrap();
                assert_eq!(reports.len(), prompt.len() - 1);
                for (report, output) in reports.iter().zip(&drawn) {
                    let expected = output.tokens[0].logprobs.as_deref().unwrap();
                    let close = (report.logprob - expected.logprob).abs() < DRIFT && report.top.len() == 5;
                    assert!(report == expected || (target == Target::Cuda && close), "{report:?} {expected:?}");
                }
                assert!(target == Target::Cuda || outputs[3].prompt == outputs[1].prompt);
            }
        }
    }
}
