//! Drives the scheduler with the slots of recurrent state through random arrivals, cancels, cache resets, tiny KV pools and
//! too few slots, over a simulated device, with one or two steps in flight as chance has it.
//!
//! The simulated device keeps a hash of the whole prefix in each slot, and draws the next token from it. A slot that was
//! shared wrongly, freed early or overwritten shows up as a wrong token.
//!
//! The seed is printed; `PEGAINFER_TEST_SEED=n cargo test -p pegainfer-qwen35-4b --test scheduler` replays it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use pegainfer_core::engine::{EngineLimits, EngineStats, EventBatch, GenerateRequest, RequestId, TokenEvent};
use pegainfer_core::kv::BlockPool;
use pegainfer_core::rng;
use pegainfer_core::sampling::SamplingParams;
use pegainfer_core::schedule::{Outcome, PLACEHOLDER, Scheduler, SchedulerConfig};
use pegainfer_kernels::ops::BLOCK_SIZE;
use pegainfer_qwen35_4b::plan::{NO_STATE, Segment, Step};
use pegainfer_qwen35_4b::scheduler::StateSlots;
use std::collections::{HashMap, VecDeque};

const VOCAB: u64 = 50;
const STEPS: u64 = 200_000;

struct Rng(u64, u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.1 += 1;
        rng::below(rng::bits(self.0, self.1), n as u64) as usize
    }
    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

/// The state after `token` in the state `before`.
fn advance(before: u64, token: u32) -> u64 {
    rng::mix(before ^ (u64::from(token) + 1))
}

fn draw(state: u64) -> u32 {
    rng::below(rng::mix(state), VOCAB) as u32
}

fn continuation(request: &GenerateRequest) -> Vec<u32> {
    let mut state = request.prompt.iter().fold(0, |state, &token| advance(state, token));
    let mut tokens = Vec::new();
    while tokens.len() < request.max_tokens {
        let token = draw(state);
        tokens.push(token);
        if request.stop_token_ids.contains(&token) {
            break;
        }
        state = advance(state, token);
    }
    tokens
}

/// What each slot holds, and the tokens that the last step drew.
struct Device {
    slots: Vec<u64>,
    drawn: Vec<u32>,
}

impl Device {
    fn run(&mut self, step: &Step) -> Outcome {
        let mut states = vec![0; step.tokens.len()];
        let mut covered = 0;
        for segment in &step.state {
            assert_eq!(segment.first, covered, "segments follow each other");
            covered = segment.end;
            let begins = step.positions[segment.first as usize] == 0;
            assert_eq!(begins, segment.from == NO_STATE, "a state of zeros is for the first token alone");
            let mut state = if begins { 0 } else { self.slots[segment.from as usize] };
            for t in segment.first..segment.end {
                let token = step.tokens[t as usize];
                let known = token & PLACEHOLDER == 0;
                let token = if known { token } else { self.drawn[(token ^ PLACEHOLDER) as usize] };
                state = advance(state, token);
                states[t as usize] = state;
            }
            self.slots[segment.to as usize] = state;
        }
        assert_eq!(covered as usize, step.tokens.len(), "segments cover the step");
        check_chains(&step.state);
        self.drawn = step.samples.iter().map(|sample| draw(states[sample.token as usize])).collect();
        Outcome { tokens: self.drawn.clone(), logprobs: vec![None; self.drawn.len()] }
    }
}

/// Segments that do not follow from each other run at once: none may touch a slot that another one writes.
fn check_chains(segments: &[Segment]) {
    let chains: Vec<_> = segments.chunk_by(|before, next| next.from == before.to).collect();
    let mut writer = HashMap::new();
    for (i, chain) in chains.iter().enumerate() {
        for segment in *chain {
            assert_eq!(*writer.entry(segment.to).or_insert(i), i, "two sequences write slot {}", segment.to);
        }
    }
    for (i, chain) in chains.iter().enumerate() {
        let other = writer.get(&chain[0].from).is_some_and(|writer| *writer != i);
        assert!(!other, "a sequence reads slot {}, which another one writes", chain[0].from);
    }
}

fn random_request(rng: &mut Rng, longest: usize) -> GenerateRequest {
    // Few distinct prefixes, so that requests go on from the state of others.
    let (family, own_from, own) = (rng.below(3) as u64, rng.below(120), rng.below(1 << 30) as u64);
    let token = |i: usize| rng::below(rng::bits(if i < own_from { family } else { own }, i as u64), VOCAB) as u32;
    GenerateRequest {
        prompt: (0..1 + rng.below(longest)).map(token).collect(),
        max_tokens: 1 + rng.below(60),
        sampling: SamplingParams::greedy(),
        rules: None,
        grammar: None,
        prompt_logprobs: None,
        priority: 0,
        stop_token_ids: if rng.chance(50) { vec![rng.below(VOCAB as usize) as u32] } else { vec![] },
        ignore_eos: true,
        logprobs: None,
        cache_salt: 0,
    }
}

struct World {
    scheduler: Scheduler<StateSlots>,
    /// What each open request has to give, and how much it gave.
    open: HashMap<RequestId, (Vec<u32>, usize)>,
    finished: usize,
}

impl World {
    fn take(&mut self, events: EventBatch) {
        for (id, event) in events {
            match event {
                TokenEvent::Token(token) => {
                    let (expected, got) = self.open.get_mut(&id).unwrap();
                    assert_eq!(token.id, expected[*got], "{id:?} got a wrong token");
                    *got += 1;
                }
                TokenEvent::Prompt(_) => panic!("nobody asked for reports"),
                TokenEvent::Finished { .. } => {
                    let (expected, got) = self.open.remove(&id).unwrap();
                    assert_eq!(expected.len(), got);
                    self.finished += 1;
                }
                TokenEvent::Admitted { .. } => {}
                TokenEvent::Failed { error } => panic!("{id:?}: {error}"),
            }
        }
    }

    /// Drops some open request, now and then.
    fn cancel(&mut self, rng: &mut Rng) {
        let mut ids: Vec<RequestId> = self.open.keys().copied().collect();
        ids.sort_unstable();
        if !ids.is_empty() && rng.chance(3) {
            let id = ids[rng.below(ids.len())];
            self.scheduler.cancel(id);
            self.open.remove(&id);
        }
    }
}

/// One random world. Returns the scheduler's counters.
fn episode(seed: u64) -> EngineStats {
    let mut rng = Rng(seed, 0);
    let (rows, copies, blocks) = (1 + rng.below(8), rng.below(6), 12 + rng.below(30));
    let interval = if copies == 0 { 0 } else { BLOCK_SIZE * (1 + rng.below(4)) };
    let limits = EngineLimits {
        max_model_len: 190,
        vocab_size: VOCAB as usize,
        block_size: BLOCK_SIZE,
        kv_blocks: blocks,
        max_num_seqs: rows,
        eos_token_ids: vec![],
        unsupported: &[],
    };
    let (pool, slots) = (BlockPool::new(blocks, BLOCK_SIZE), rows + copies);
    let config = SchedulerConfig {
        max_num_seqs: rows,
        max_num_batched_tokens: rows + rng.below(100),
        max_num_mixed_tokens: rng.below(100),
        eos_token_ids: vec![],
    };
    let scheduler = Scheduler::new(config, pool.clone(), StateSlots::new(rows, copies, interval));
    let mut world = World { scheduler, open: HashMap::new(), finished: 0 };
    let mut device = Device { slots: vec![0; slots], drawn: vec![] };
    let mut in_flight: VecDeque<Step> = VecDeque::new();
    let (eager, mut next, mut idle) = ([0, 50, 100][rng.below(3)], 0, 0);
    for turn in 0.. {
        if turn < 400 && world.open.len() < 20 && rng.chance(30) {
            let request = random_request(&mut rng, 120);
            if limits.check(&request).is_ok() {
                world.open.insert(RequestId(next), (continuation(&request), 0));
                world.scheduler.add(RequestId(next), request);
                next += 1;
            }
        }
        world.cancel(&mut rng);
        if rng.chance(1) {
            world.scheduler.reset_prefix_cache();
        }
        let mut planned = false;
        if in_flight.is_empty() || (in_flight.len() == 1 && rng.chance(eager)) {
            let (step, admitted) = world.scheduler.plan(false);
            world.take(admitted);
            planned = !step.is_empty();
            in_flight.extend(planned.then_some(step));
        }
        world.cancel(&mut rng);
        if in_flight.len() == 2 || !planned || !rng.chance(eager) {
            match in_flight.pop_front() {
                Some(step) => {
                    let outcome = device.run(&step);
                    let events = world.scheduler.commit(&step, outcome);
                    world.take(events);
                }
                None => {
                    assert!(!world.scheduler.has_work(), "work without a step: the scheduler hangs");
                    idle += 1;
                }
            }
        }
        if turn >= 400 && !world.scheduler.has_work() {
            break;
        }
        assert!(turn < 100_000, "a request starves; {idle} idle turns");
    }
    assert!(world.open.is_empty() && in_flight.is_empty() && world.finished > 0);
    let memory = world.scheduler.state();
    assert_eq!(memory.free(), (slots - memory.copies(), slots), "slots leaked");
    world.scheduler.stats()
}

#[test]
fn random_steps_never_mix_up_states_and_leak_no_slot() {
    let seed = match std::env::var("PEGAINFER_TEST_SEED") {
        Ok(seed) => seed.parse().expect("PEGAINFER_TEST_SEED is a number"),
        Err(_) => std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
    };
    let (mut steps, mut episodes, mut preemptions, mut hits) = (0, 0, 0, 0);
    while steps < STEPS {
        let world = seed.wrapping_add(episodes);
        let Ok(stats) = std::panic::catch_unwind(|| episode(world)) else {
            panic!("replay with PEGAINFER_TEST_SEED={world}");
        };
        steps += stats.steps;
        preemptions += stats.preemptions;
        hits += stats.prefix_hits;
        episodes += 1;
    }
    println!("seed {seed}: {steps} steps, {episodes} worlds, {preemptions} preemptions, {hits} cached tokens");
    assert!(preemptions > STEPS / 2000 && hits > STEPS / 10, "the worlds are too easy");
}

#[test]
fn copies_leave_a_slot_for_every_sequence() {
    let (rows, copies) = (6, 3);
    let config = SchedulerConfig {
        max_num_seqs: rows,
        max_num_batched_tokens: 999,
        max_num_mixed_tokens: 99,
        eos_token_ids: vec![],
    };
    let mut scheduler =
        Scheduler::new(config, BlockPool::new(99, BLOCK_SIZE), StateSlots::new(rows, copies, BLOCK_SIZE));
    for id in 0..rows as u64 {
        let prompt = (0..100).map(|i| (7 * id as u32 + i) % VOCAB as u32).collect();
        scheduler.add(RequestId(id), GenerateRequest { prompt, ..random_request(&mut Rng(1, 1), 9) });
    }
    let (step, admitted) = scheduler.plan(false);
    assert_eq!(
        (step.rows.len(), admitted.len()),
        (rows, rows),
        "six copies of each would take all slots from the second"
    );
    assert_eq!(step.state.len(), rows + copies, "the first has three copies");
    assert_eq!(scheduler.state().free(), (0, rows + copies));
}
