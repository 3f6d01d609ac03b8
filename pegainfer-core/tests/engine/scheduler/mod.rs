//! Drives the scheduler through random arrivals, cancellations, cache resets, tiny KV pools and too few state slots, on
//! a simulated device, with one or two steps in flight at random. There are three kinds of models: all state in KV
//! blocks, state slots that one kernel reads and another writes, and state slots updated in place.
//!
//! For every token, the simulated device writes a hash of the whole prefix into the token's KV slot, and reads every
//! slot of the row's block table before it samples. A block that was shared wrongly, freed early or overwritten shows
//! as a wrong hash. A token that depends on scheduling, or logits processors that do not know the whole text, show as a
//! wrong continuation. The device runs a step as late as possible: when it is finished, after the next one was planned.
//!
//! Half of the worlds of the first two kinds keep copies of blocks and states in host memory, and half of these on a
//! disk, too. They are slow, fail and change bits (media.rs), and the engine may be killed. There every slot of a
//! sequence's context is compared in every step.
//!
//! The seed is printed; `PEGAINFER_TEST_SEED=n cargo test -p pegainfer-core --test engine scheduler::` replays it,
//! apart from the timing of grammar masks.

mod copies;
mod failures;
mod fairness;
mod grammars;
mod media;
mod resets;
mod states_on_disk;
mod world;

use crate::kinds::{InPlace, Kind, KvOnly, Recurrent};
use crate::requests::{EOS, VOCAB, Waltz};
use pegainfer_core::engine::{EventBatch, GenerateRequest, RequestId, TokenEvent};
use pegainfer_core::grammar::{Grammar, Matcher};
use pegainfer_core::kv::BlockPool;
use pegainfer_core::kv::tiers::TierStats;
use pegainfer_core::logits_processors::TokenMask;
use pegainfer_core::schedule::{Outcome, Scheduler, SchedulerConfig, StateConfig, StateSlots, Step};
use std::sync::Arc;
use std::time::Duration;
use world::World;

/// Tokens of a KV block.
const BLOCK_TOKENS: usize = 16;
/// Steps of each kind of model, unless `PEGAINFER_TEST_STEPS` says otherwise.
const STEPS: u64 = 300_000;

/// [`STEPS`] steps of random worlds of one kind.
fn simulate<K: Kind>() {
    let all = std::env::var("PEGAINFER_TEST_STEPS").map_or(STEPS, |steps| steps.parse().expect("a number of steps"));
    let seed = match std::env::var("PEGAINFER_TEST_SEED") {
        Ok(seed) => seed.parse().expect("PEGAINFER_TEST_SEED is a number"),
        Err(_) => std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
    };
    let (mut steps, mut episodes, mut preemptions, mut hits, mut accepted, mut ruled) = (0, 0, 0, 0, 0, 0);
    let mut tiers = TierStats::default();
    while steps < all {
        let episode_seed = seed.wrapping_add(episodes);
        let world = std::panic::AssertUnwindSafe(|| World::<K>::new(episode_seed).run(600));
        match std::panic::catch_unwind(world) {
            Ok((stats, accepted_by_grammars)) => {
                steps += stats.steps;
                preemptions += stats.preemptions;
                hits += stats.prefix_hits;
                tiers = tiers.plus(stats.tiers);
                accepted += stats.speculation.accepted_tokens();
                ruled += accepted_by_grammars;
            }
            Err(_) => panic!("replay with PEGAINFER_TEST_SEED={episode_seed}"),
        }
        episodes += 1;
    }
    println!(
        "seed {seed}: {steps} steps, {episodes} episodes, {preemptions} preemptions, {hits} cached tokens, {accepted} drafts, \
         {ruled} of them under a grammar"
    );
    println!("{tiers:?}");
    if K::HAS_TIERS {
        let has_states = tiers.state_slots > 0;
        assert!(tiers.hits > if has_states { STEPS / 500 } else { STEPS / 50 }, "little is loaded");
        let least = if has_states { STEPS / 6000 } else { STEPS / 3000 };
        assert!(tiers.read_blocks > least, "little is read from the disk");
        assert!(!has_states || tiers.read_states > STEPS / 8000, "few states are read from the disk");
        assert!(!has_states || tiers.loaded_states > STEPS / 6000, "few states are loaded");
        assert!(tiers.corrupt_blocks > 5 && tiers.failed_transfers > 100, "the media are too good");
    }
    assert!(preemptions > STEPS / K::STEPS_PER_PREEMPTION && hits > STEPS / 100, "the worlds are too easy");
    // Any of these counts varies by a tenth or two from seed to seed; the bounds are at half of the lowest seen.
    assert!(!K::DRAFTS || accepted > STEPS / 24, "few drafts are accepted: {accepted}");
    assert!(!K::DRAFTS || ruled > STEPS / 320, "few drafts of requests with a grammar are accepted: {ruled}");
}

#[test]
fn random_steps_leak_nothing_and_finish_every_request_once() {
    simulate::<KvOnly>();
}

#[test]
fn recurrent_states_are_never_mixed_up_and_leak_no_slot() {
    simulate::<Recurrent>();
}

#[test]
fn states_updated_in_place_end_their_chunks_where_they_are_kept() {
    simulate::<InPlace>();
}

#[test]
fn snapshots_leave_a_slot_for_every_sequence() {
    let (sequences, snapshots) = (6, 3);
    let block_tokens = BLOCK_TOKENS;
    let slots = StateConfig { sequences, snapshots, interval: block_tokens, block_tokens, within_chunks: true };
    let config = SchedulerConfig {
        max_num_seqs: sequences,
        max_num_batched_tokens: 999,
        max_num_mixed_tokens: 99,
        speculation: None,
        eos_token_ids: vec![],
        max_loras: 0,
    };
    let mut scheduler = Scheduler::new(config, BlockPool::new(99, block_tokens), StateSlots::new(slots));
    for id in 0..sequences as u64 {
        let prompt: Vec<u32> = (0..100).map(|i| (7 * id as u32 + i) % VOCAB).collect();
        scheduler.add(RequestId(id), GenerateRequest::greedy(prompt, 9));
    }
    let (step, admitted) = scheduler.plan(false);
    let admissions = (step.rows.len(), admitted.len());
    assert_eq!(admissions, (sequences, sequences), "six snapshots of each would take all slots from the second");
    assert_eq!(step.state.len(), sequences + snapshots, "the first has three snapshots");
    assert_eq!(scheduler.state().available(), 0);
}

/// Outcome of a step without drafts.
fn outcome(tokens: Vec<u32>) -> Outcome {
    Outcome { logprobs: vec![None; tokens.len()], tokens, ..Outcome::default() }
}

/// A scheduler for `seqs` sequences and steps of `tokens` tokens, 64 in mixed steps, over `blocks` blocks.
fn scheduler(seqs: usize, tokens: usize, blocks: usize) -> Scheduler {
    scheduler_with(seqs, (tokens, 64), blocks)
}

/// A scheduler with these `max_num_batched_tokens` and `max_num_mixed_tokens`.
fn scheduler_with(seqs: usize, (tokens, mixed): (usize, usize), blocks: usize) -> Scheduler {
    let config = SchedulerConfig {
        max_num_seqs: seqs,
        max_num_batched_tokens: tokens,
        max_num_mixed_tokens: mixed,
        speculation: None,
        eos_token_ids: vec![EOS],
        max_loras: 0,
    };
    Scheduler::new(config, BlockPool::new(blocks, BLOCK_TOKENS), ())
}

/// A scheduler over 20 blocks with slots for adapters.
fn scheduler_with_adapters(max_loras: usize) -> Scheduler {
    let config = SchedulerConfig { max_loras, ..scheduler(4, 256, 20).config().clone() };
    Scheduler::new(config, BlockPool::new(20, BLOCK_TOKENS), ())
}

fn plain(max_tokens: usize) -> GenerateRequest {
    GenerateRequest { ignore_eos: true, ..GenerateRequest::greedy(vec![5; 20], max_tokens) }
}

#[test]
fn lower_numbers_run_first_and_what_runs_goes_on() {
    let mut scheduler = scheduler(1, 64, 8);
    let add = |scheduler: &mut Scheduler, id, priority| {
        scheduler.add(RequestId(id), GenerateRequest { priority, ..plain(3) });
    };
    add(&mut scheduler, 0, 7);
    let (mut order, mut steps) = (vec![], 0);
    while scheduler.has_work() {
        let (step, _) = scheduler.plan(false);
        let tokens = vec![2; step.samples.len()];
        let outcome = outcome(tokens);
        let ended = |event: &TokenEvent| matches!(event, TokenEvent::Finished { .. });
        order.extend(scheduler.commit(&step, outcome).iter().filter(|(_, event)| ended(event)).map(|(id, _)| id.0));
        if steps == 0 {
            [(1, 0), (2, 5), (3, -1), (4, 0)].into_iter().for_each(|(id, priority)| add(&mut scheduler, id, priority));
        }
        steps += 1;
    }
    assert_eq!(order, [0, 3, 1, 4, 2]);
}

/// A grammar whose second mask waits for the test and fails for token 1.
#[derive(Debug)]
struct Late(Arc<std::sync::Barrier>);

impl Grammar for Late {
    fn start(&self) -> (Box<dyn Matcher>, Arc<TokenMask>) {
        (Box::new(Self(self.0.clone())), Arc::new(TokenMask::new(&[1, 2], VOCAB as usize)))
    }
}

impl Matcher for Late {
    fn next(&mut self, token: u32) -> Result<Arc<TokenMask>, String> {
        self.0.wait();
        if token == 1 { Err("no token may follow 1".into()) } else { Ok(Waltz::mask(Some(token))) }
    }
}

#[test]
fn a_late_mask_delays_one_step_and_then_its_own_request_only_and_a_failure_ends_no_other() {
    for first in [1, 2] {
        let mut scheduler = scheduler(4, 64, 64);
        let barrier = Arc::new(std::sync::Barrier::new(2));
        let request = |grammar| GenerateRequest { grammar, ..plain(6) };
        scheduler.add(RequestId(0), request(Some(Arc::new(Late(barrier.clone())))));
        scheduler.add(RequestId(1), request(None));
        let commit =
            |scheduler: &mut Scheduler, step: &Step| scheduler.commit(step, outcome(vec![first; step.samples.len()]));
        let (step, _) = scheduler.plan(false);
        assert_eq!((step.rows.len(), step.is_deferred()), (2, false), "the first mask is ready");
        commit(&mut scheduler, &step);
        // The forward pass does not wait for the mask.
        let (mut step, _) = scheduler.plan(false);
        scheduler.resolve(&mut step);
        assert_eq!(step.samples.iter().map(|sample| sample.deferred).collect::<Vec<_>>(), [true, false]);
        scheduler.set_late(&step);
        let grammar = scheduler.waiting_for_mask(Some(&step)).expect("the step waits for the mask");
        barrier.wait();
        grammar.wait(Duration::from_secs(10));
        scheduler.resolve(&mut step);
        assert!(!step.is_deferred() && scheduler.waiting_for_mask(Some(&step)).is_none());
        let events = commit(&mut scheduler, &step);
        if first == 1 {
            let failed = TokenEvent::GrammarFailed { error: "no token may follow 1".into() };
            assert_eq!(events.iter().map(|(id, _)| id.0).collect::<Vec<_>>(), [1, 0], "it has no second token");
            assert!(events.contains(&(RequestId(0), failed)), "{events:?}");
            assert_eq!((0..5).map(|_| run_step(&mut scheduler).0).collect::<Vec<_>>(), [1, 1, 1, 1, 0]);
            assert!(!scheduler.has_work(), "the other one ends as it would have");
        } else {
            assert_eq!(events.len(), 2);
            for _ in 0..3 {
                let (step, _) = scheduler.plan(false);
                assert_eq!((step.rows.len(), step.rows[0].id), (1, RequestId(1)), "the other one goes on");
                commit(&mut scheduler, &step);
            }
            let grammar = scheduler.waiting_for_mask(None).expect("the plan waits for the mask");
            barrier.wait();
            grammar.wait(Duration::from_secs(10));
            let (step, _) = scheduler.plan(false);
            assert_eq!((step.rows.len(), step.is_deferred()), (2, false));
            assert_eq!(step.samples[0].logits_update.clone().unwrap().allowed, Some(Waltz::mask(Some(2))));
            commit(&mut scheduler, &step);
            scheduler.cancel(RequestId(0));
            scheduler.cancel(RequestId(1));
            barrier.wait();
        }
    }
}

#[test]
fn admission_can_be_delayed_and_a_step_takes_all_prompts_unless_many_decode() {
    for (decoding, tokens, left) in [(0, 24_000, None), (24, 24_024, None), (40, 4096, Some(18_000))] {
        let mut scheduler = scheduler(64, 30_000, 4000);
        for id in 0..decoding {
            scheduler.add(RequestId(id), plain(9));
        }
        if decoding > 0 {
            let (step, _) = scheduler.plan(false);
            let tokens = vec![2; step.samples.len()];
            scheduler.commit(&step, outcome(tokens));
        }
        scheduler.add(RequestId(100), GenerateRequest { prompt: vec![6; 2000].into(), ..plain(9) });
        assert_eq!(scheduler.delayable_tokens(), None, "one alone does not wait");
        for id in 101..112 {
            scheduler.add(RequestId(id), GenerateRequest { prompt: vec![id as u32; 2000].into(), ..plain(9) });
        }
        assert_eq!(scheduler.delayable_tokens(), Some(24_000));
        if decoding > 0 {
            let (step, admitted) = scheduler.plan(true);
            assert_eq!((step.tokens.len(), admitted.len()), (decoding as usize, 0), "decoding sequences go on");
            let tokens = vec![2; step.samples.len()];
            scheduler.commit(&step, outcome(tokens));
        }
        assert_eq!(scheduler.plan(false).0.tokens.len(), tokens);
        assert_eq!(scheduler.delayable_tokens(), left, "the others have been admitted");
    }
}

/// Runs the next step, whose samples all draw token 2; returns its number of input tokens and its events.
fn run_step(scheduler: &mut Scheduler) -> (usize, EventBatch) {
    let (step, mut events) = scheduler.plan(false);
    if step.is_empty() {
        return (0, events);
    }
    let tokens = vec![2; step.samples.len()];
    events.extend(scheduler.commit(&step, outcome(tokens)));
    (step.tokens.len(), events)
}

#[test]
fn choices_of_one_prompt_compute_it_once() {
    let mut scheduler = scheduler(8, 512, 256);
    let prompt: Vec<u32> = (0..100).map(|i| i % VOCAB).collect();
    let choice = |same_prompt_as| GenerateRequest {
        ignore_eos: true,
        same_prompt_as,
        ..GenerateRequest::greedy(prompt.clone(), 4)
    };
    scheduler.add(RequestId(0), choice(None));
    for id in 1..4 {
        scheduler.add(RequestId(id), choice(Some(RequestId(0))));
    }
    scheduler.add(RequestId(4), plain(4));
    assert_eq!(run_step(&mut scheduler).0, 100 + 20, "one prompt, and the request after the other choices");
    let (tokens, events) = run_step(&mut scheduler);
    assert_eq!(tokens, 3 * 4 + 2, "96 tokens are in full blocks");
    let cached = |(_, event): &(RequestId, TokenEvent)| matches!(event, TokenEvent::Admitted { cached_tokens: 96 });
    assert_eq!(events.iter().filter(|event| cached(event)).count(), 3);
}

#[test]
fn choices_go_on_when_the_first_one_is_cancelled() {
    let mut scheduler = scheduler(8, 512, 256);
    let choice = |same_prompt_as| GenerateRequest { same_prompt_as, ..plain(4) };
    scheduler.add(RequestId(0), choice(None));
    scheduler.add(RequestId(1), choice(Some(RequestId(0))));
    scheduler.cancel(RequestId(0));
    assert_eq!(run_step(&mut scheduler).0, 20);
}
