//! A device that refuses one request: only that request ends, and the others are not affected.

use super::BLOCK_TOKENS;
use crate::device::Device;
use crate::drafts::Oracle;
use crate::kinds::{Kind, KvOnly};
use crate::requests::{EOS, Rng, VOCAB, mix};
use pegainfer_core::engine::{EventBatch, GenerateRequest, RequestId, TokenEvent};
use pegainfer_core::kv::{BlockPool, NO_SLOT};
use pegainfer_core::logits_processors::{LogitsProcessorParams, LogitsProcessors};
use pegainfer_core::schedule::speculation::{DraftSource, ModelMethod, Speculation};
use pegainfer_core::schedule::{Scheduler, SchedulerConfig, Step, StepRow};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Blocks of the pool: all requests fit.
const BLOCKS: usize = 64;
/// Requests, each for [`MAX_TOKENS`] tokens.
const REQUESTS: u64 = 6;
const MAX_TOKENS: usize = 24;
/// The request that the device refuses.
const GUILTY: RequestId = RequestId(2);
const PROMPT_LEN: usize = 40;

/// Result of a run.
#[derive(Default)]
struct Ran {
    tokens: BTreeMap<RequestId, Vec<u32>>,
    failed: Vec<(RequestId, String)>,
    failed_steps: u64,
    accepted_drafts: u64,
    /// Steps in flight together with a failed one.
    dropped: usize,
}

impl Ran {
    fn take(&mut self, events: EventBatch) {
        for (id, event) in events {
            match event {
                TokenEvent::Token(token) => self.tokens.entry(id).or_default().push(token.id),
                TokenEvent::Failed { error } => self.failed.push((id, error)),
                _ => {}
            }
        }
    }
}

/// A scheduler of all requests, half of them with penalties.
fn scheduler(speculation: Option<Speculation>) -> Scheduler {
    let config = SchedulerConfig {
        max_num_seqs: REQUESTS as usize,
        max_num_batched_tokens: 96,
        max_num_mixed_tokens: 96,
        eos_token_ids: vec![EOS],
        speculation,
        max_loras: 0,
    };
    let mut scheduler = Scheduler::new(config, BlockPool::new(BLOCKS, BLOCK_TOKENS), ());
    for id in 0..REQUESTS {
        let prompt: Vec<u32> = (0..PROMPT_LEN as u64).map(|i| (mix(id << 32 | i) % u64::from(VOCAB)) as u32).collect();
        let penalty = LogitsProcessorParams { frequency_penalty: 0.5, ..LogitsProcessorParams::default() };
        let logits_processors = (id % 2 == 0).then(|| LogitsProcessors::new(penalty, VOCAB as usize).unwrap());
        let request = GenerateRequest {
            ignore_eos: true,
            logits_processors: logits_processors.flatten(),
            ..GenerateRequest::greedy(prompt, MAX_TOKENS)
        };
        scheduler.add(RequestId(id), request);
    }
    scheduler
}

/// Runs all requests with up to `depth` steps in flight on a device that refuses the tokens of [`GUILTY`] from position
/// `refused_from` on.
fn run(depth: usize, oracle: &Oracle, speculation: Option<Speculation>, refused_from: usize) -> Ran {
    let mut scheduler = scheduler(speculation);
    let states = KvOnly::new(&mut Rng(1), REQUESTS as usize).1;
    let mut device = Device {
        kv: vec![0; BLOCKS * BLOCK_TOKENS],
        kv_adapters: vec![None; BLOCKS * BLOCK_TOKENS],
        states,
        sampled: vec![],
        counts: Default::default(),
        oracle: oracle.clone(),
    };
    let (mut ran, mut in_flight) = (Ran::default(), VecDeque::<Step>::new());
    while scheduler.has_work() {
        if in_flight.len() < depth && in_flight.back().is_none_or(|newest| !newest.is_deferred()) {
            let (step, admitted) = scheduler.plan(false);
            ran.take(admitted);
            if !step.is_empty() {
                in_flight.push_back(step);
                continue;
            }
        }
        let mut step = in_flight.pop_front().expect("work without a step");
        let is_refused = |row: &StepRow| row.id == GUILTY && row.computed + row.drafts > refused_from;
        if step.rows.iter().any(is_refused) {
            ran.dropped += in_flight.len();
            in_flight.drain(..).chain([step.clone()]).for_each(|step| spoil(&mut device, &step));
            ran.take(scheduler.fail_step(&step, "the row is refused"));
        } else {
            if step.is_deferred() {
                scheduler.resolve(&mut step);
            }
            ran.take(scheduler.commit(&step, device.run(&step)));
        }
        scheduler.check_blocks().unwrap();
    }
    let stats = scheduler.stats();
    assert_eq!(stats.kv_blocks_free, BLOCKS, "blocks leaked");
    Ran { failed_steps: stats.failed_steps, accepted_drafts: stats.speculation.accepted_tokens(), ..ran }
}

/// Garbage wherever a step writes.
fn spoil(device: &mut Device<KvOnly>, step: &Step) {
    let written = step.slots.iter().filter(|slot| **slot != NO_SLOT);
    written.for_each(|slot| device.kv[*slot as usize] = mix(u64::from(*slot) ^ 0xBAD));
}

#[test]
fn a_request_that_the_device_refuses_ends_alone_and_the_others_get_their_tokens() {
    // One draft in ten is wrong.
    let oracle = Oracle::of(10);
    let speculation = |source| Speculation {
        num_tokens: 3,
        source,
        adaptive: false,
        draft_vocab_size: None,
        synthetic_acceptance_length: None,
    };
    let host = || Some(speculation(DraftSource::Host(Arc::new(oracle.clone()))));
    let model = || Some(speculation(DraftSource::Model(ModelMethod::Mtp)));
    let sources: [&dyn Fn() -> Option<Speculation>; 3] = [&|| None, &host, &model];
    let mut dropped = 0;
    for (source, make) in sources.into_iter().enumerate() {
        for depth in [1, 2] {
            let expected = run(depth, &oracle, make(), usize::MAX);
            assert_eq!((expected.failed_steps, expected.failed.len()), (0, 0));
            assert_eq!(expected.accepted_drafts > 0, source > 0);
            // The first token, the middle of the prompt, its last token, and generated ones.
            for refused_from in [0, PROMPT_LEN / 2, PROMPT_LEN - 1, PROMPT_LEN, PROMPT_LEN + MAX_TOKENS / 2] {
                let what = format!("drafts {source}, depth {depth}, refused from {refused_from}");
                let Ran { mut tokens, failed, failed_steps, dropped: d, .. } =
                    run(depth, &oracle, make(), refused_from);
                assert_eq!(failed, [(GUILTY, "the row is refused".to_owned())], "{what}");
                let guilty = tokens.remove(&GUILTY).unwrap_or_default();
                assert!(expected.tokens[&GUILTY].starts_with(&guilty), "{what}");
                assert!(guilty.len() <= (refused_from + 1).saturating_sub(PROMPT_LEN), "{what}");
                assert!(expected.tokens.iter().filter(|(id, _)| **id != GUILTY).eq(&tokens), "{what}");
                // Without drafts each failure is of the same token: together, together again, and alone.
                assert!(failed_steps == 3 || (source > 0 && failed_steps < 3 * 4), "{what}: {failed_steps} failures");
                dropped += d;
            }
        }
    }
    assert!(dropped > 5, "{dropped} steps in flight were dropped with a failed one");
}

#[test]
fn suspects_run_alone_whoever_waits_and_a_failure_by_chance_ends_nobody() {
    let mut scheduler = scheduler(None);
    let fail = |scheduler: &mut Scheduler| {
        let (step, _) = scheduler.plan(false);
        let rows: Vec<u64> = step.rows.iter().map(|row| row.id.0).collect();
        assert!(scheduler.fail_step(&step, "by chance").is_empty());
        rows
    };
    let rows = fail(&mut scheduler);
    assert_eq!(rows, [0, 1, 2]);
    assert_eq!(fail(&mut scheduler), rows, "they run again first");
    assert_eq!((scheduler.stats().running, scheduler.stats().kv_blocks_free), (0, BLOCKS));
    let tenant = 7 << 32;
    scheduler.add(RequestId(9), GenerateRequest { tenant, priority: -1, ..GenerateRequest::greedy(vec![1; 20], 4) });
    for suspect in rows {
        let (step, _) = scheduler.plan(false);
        assert_eq!(step.rows.iter().map(|row| row.id.0).collect::<Vec<_>>(), [suspect]);
        assert!(scheduler.plan(false).0.is_empty(), "nothing else is in flight");
        let tokens = vec![2; step.samples.len()];
        scheduler.commit(&step, super::outcome(tokens));
    }
    let (step, _) = scheduler.plan(false);
    assert!(step.rows.len() > 1, "all have drawn a token: they run together again");
}
