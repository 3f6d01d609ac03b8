//! A request gives the same bits however it is scheduled: whole or in chunks, alone or in a batch, from a cold or a
//! warm prefix cache, preempted or not, with one or two steps in flight. Tokens and bits of all reported
//! log-probabilities are compared; a GPU follows the rule of [`crate::support::invariance`].

use crate::support::distribution::samples_follow_their_probabilities as samples_follow;
use crate::support::invariance::Alone;
use crate::support::speculation::lookup_drafts_change_no_token;
use crate::support::{best, engine, fixture, greedy, options, requests, run};
use pegainfer_core::engine::StepEngine;
use pegainfer_runtime::LoadOptions;

fn alone() -> Alone {
    Alone::new(&mut engine(best(), &options()), best(), requests())
}

/// Runs on the fastest instruction set; the op tests cover the others.
#[test]
fn bits_do_not_depend_on_chunks() {
    let alone = alone();
    // Token by token, only the short ones.
    for (budget, first) in [(1, 12), (7, 0), (50, 0)] {
        let options = LoadOptions { max_num_seqs: Some(1), max_num_batched_tokens: Some(budget), ..options() };
        alone.skip(first).holds(&format!("chunks of {budget}"), &mut engine(best(), &options));
    }
}

#[test]
fn bits_do_not_depend_on_company_cache_or_preemption() {
    let many = alone().cycle(32);
    many.holds_cold_and_warm(&mut engine(best(), &options()));
    // Capacity for four snapshots.
    let mixed = LoadOptions { max_num_batched_tokens: Some(48), state_cache_bytes: Some(8_000_000), ..options() };
    let tight = LoadOptions { kv_cache_bytes: Some(50 * 16 * 2048), max_num_batched_tokens: Some(64), ..options() };
    many.holds_mixed_and_preempted(|| engine(best(), &mixed), || engine(best(), &tight));
}

/// Accepted drafts are computed again from the kept state.
#[test]
fn drafts_change_no_bit() {
    let tight = LoadOptions { kv_cache_bytes: Some(50 * 16 * 2048), max_num_batched_tokens: Some(64), ..options() };
    let with = |options: &LoadOptions, speculation| engine(best(), &LoadOptions { speculation, ..options.clone() });
    let alone = alone();
    alone.cycle(32).holds_with_drafts(|drafts| with(&options(), drafts), |drafts| with(&tight, drafts));
    lookup_drafts_change_no_token(Some(best()), |drafts| with(&options(), drafts));
}

#[test]
fn samples_follow_their_probabilities() {
    samples_follow(&mut engine(best(), &options()), &fixture().cases);
}

/// Without capacity for snapshots the prefix cache is off, silently.
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

/// A repeated prompt is found up to its last full block; one with a common beginning is found up to a snapshot before
/// it diverges.
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
