//! Drives the scheduler through random arrivals, cancels and cache resets over few pages and slots, on a simulated device.
//!
//! The device keeps in every slot a hash of the whole text and of its beginnings at multiples of 128 tokens, and leaves
//! each of those in the page that it belongs to. A slot or page that was shared wrongly, freed early or overwritten shows
//! up as a wrong hash, and a token that depends on scheduling as a wrong continuation.
//!
//! The seed is printed; `PEGAINFER_TEST_SEED=n cargo test -p pegainfer-deepseek-v4 --test scheduler` replays it.

#![cfg(feature = "deepseek-v4")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use pegainfer_core::engine::{FinishReason, GenerateRequest, RequestId, TokenEvent};
use pegainfer_core::kv::BlockPool;
use pegainfer_core::sampling::SamplingParams;
use pegainfer_deepseek_v4::plan::{Outcome, PAGE_TOKENS, Step};
use pegainfer_deepseek_v4::scheduler::{Scheduler, SchedulerConfig};
use std::collections::HashMap;

const PAGES: usize = 9;
const SEQUENCES: usize = 4;
const STATES: usize = 3;
const BUDGET: usize = 150;
const EOS: u32 = 49;
const STEPS: usize = 40_000;

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        (mix(self.0) % n as u64) as usize
    }
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

fn extend(hash: u64, token: u32) -> u64 {
    mix(hash ^ (u64::from(token) + 1))
}

fn next_token(hash: u64) -> u32 {
    (mix(hash) % 50) as u32
}

fn continuation(request: &GenerateRequest) -> Vec<u32> {
    let mut hash = request.prompt.iter().fold(0, |hash, token| extend(hash, *token));
    let mut tokens = Vec::new();
    while tokens.len() < request.max_tokens && tokens.last() != Some(&EOS) {
        tokens.push(next_token(hash));
        hash = extend(hash, tokens[tokens.len() - 1]);
    }
    tokens
}

/// The state of a sequence: how much of it, its hash, and that of its beginnings at page boundaries.
#[derive(Clone, Default)]
struct Slot {
    computed: usize,
    hash: u64,
    pages: Vec<u64>,
}

struct Device {
    slots: Vec<Slot>,
    pages: Vec<u64>,
}

impl Device {
    fn run(&mut self, step: &Step) -> Outcome {
        for &(from, to) in &step.copies {
            self.slots[to as usize] = self.slots[from as usize].clone();
        }
        let mut hashes = Vec::new();
        for (b, row) in step.rows.iter().enumerate() {
            let tokens = step.qo_indptr[b] as usize..step.qo_indptr[b + 1] as usize;
            let (first, slot) = (row.computed - tokens.len(), &mut self.slots[step.slots[b] as usize]);
            assert!(!tokens.is_empty() && step.positions[tokens.start] as usize == first);
            if first == 0 {
                *slot = Slot::default();
            }
            assert_eq!(slot.computed, first, "the slot is another sequence's");
            let table = &step.page_tables[b * step.max_pages..][..step.max_pages];
            for (page, expected) in table.iter().zip(&slot.pages) {
                assert_eq!(self.pages[*page as usize], *expected, "the page is another text's");
            }
            for token in &step.tokens[tokens] {
                slot.hash = extend(slot.hash, *token);
                slot.computed += 1;
                if slot.computed.is_multiple_of(PAGE_TOKENS) {
                    self.pages[table[slot.pages.len()] as usize] = slot.hash;
                    slot.pages.push(slot.hash);
                }
                hashes.push(slot.hash);
            }
        }
        assert!(step.tokens.len() <= BUDGET && step.rows.len() <= SEQUENCES);
        let mut used = step.slots.clone();
        used.sort_unstable();
        assert!(used.windows(2).all(|pair| pair[0] != pair[1]), "two rows share a slot");
        for &(from, to) in &step.snapshots {
            self.slots[to as usize] = self.slots[from as usize].clone();
        }
        let tokens: Vec<u32> = step.samples.iter().map(|row| next_token(hashes[row.token as usize])).collect();
        Outcome { logprobs: vec![None; tokens.len()], tokens }
    }
}

fn request(rng: &mut Rng) -> GenerateRequest {
    // Two texts that many requests begin with, for prefix hits.
    let (text, shared) = (rng.below(2) as u32, rng.below(500));
    let own = (0..rng.below(60)).map(|_| rng.below(49) as u32).collect::<Vec<_>>();
    let mut prompt: Vec<u32> = (0..shared as u32).map(|i| (i * 7 + text) % 49).collect();
    prompt.extend(own);
    prompt.push(1);
    GenerateRequest {
        prompt,
        max_tokens: 1 + rng.below(200),
        sampling: SamplingParams::greedy(),
        rules: None,
        grammar: None,
        prompt_logprobs: None,
        priority: 0,
        stop_token_ids: vec![],
        ignore_eos: false,
        logprobs: None,
        cache_salt: rng.below(2) as u64,
    }
}

#[test]
fn random_traffic_gives_every_request_its_own_continuation() {
    let seed = std::env::var("PEGAINFER_TEST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(20_261_121);
    println!("seed {seed}");
    let mut rng = Rng(seed);
    let config = SchedulerConfig {
        max_num_seqs: SEQUENCES,
        cached_states: STATES,
        max_num_batched_tokens: BUDGET,
        eos_token_ids: vec![EOS],
    };
    let pool = BlockPool::new(PAGES, PAGE_TOKENS);
    let mut scheduler = Scheduler::new(config, pool.clone());
    let mut device = Device { slots: vec![Slot::default(); SEQUENCES + STATES], pages: vec![0; PAGES] };
    let mut open: HashMap<RequestId, (Vec<u32>, usize)> = HashMap::new();
    let (mut next, mut finished, mut cancelled, mut idle) = (0, 0, 0, 0);
    for _ in 0..STEPS {
        if open.len() < 12 && rng.below(100) < 15 {
            let request = request(&mut rng);
            open.insert(RequestId(next), (continuation(&request), 0));
            scheduler.add(RequestId(next), request);
            next += 1;
        }
        let (step, _) = scheduler.plan();
        // One of the newest: older ones are over.
        let cancel =
            (rng.below(100) < 2 && next > 0).then(|| RequestId(next - 1 - rng.below(next.min(12) as usize) as u64));
        if let Some(id) = cancel {
            // Between plan and commit: the step in flight may have it.
            scheduler.cancel(id);
            cancelled += usize::from(open.remove(&id).is_some());
        }
        if rng.below(1000) == 0 {
            scheduler.reset_prefix_cache();
        }
        if step.is_empty() {
            assert!(!scheduler.has_work(), "requests wait, and nothing runs");
            idle += 1;
            continue;
        }
        let outcome = device.run(&step);
        for (id, event) in scheduler.commit(&step, outcome) {
            let (expected, got) = open.get_mut(&id).expect("an event of a request that is over");
            match event {
                TokenEvent::Token(token) => {
                    assert_eq!(token.id, expected[*got], "{id:?}, token {got}");
                    *got += 1;
                }
                TokenEvent::Finished { reason, .. } => {
                    assert_eq!(*got, expected.len());
                    assert_eq!(matches!(reason, FinishReason::Stop(_)), expected[*got - 1] == EOS);
                    open.remove(&id);
                    finished += 1;
                }
                other => panic!("{other:?}"),
            }
        }
    }
    let stats = scheduler.stats();
    println!("{finished} finished, {cancelled} cancelled, {idle} idle steps, {stats:?}");
    assert!(finished > 1000 && cancelled > 100 && stats.preemptions > 30 && stats.prefix_hits > 10_000);
    for id in open.keys() {
        scheduler.cancel(*id);
    }
    assert_eq!(scheduler.stats().kv_blocks_free, PAGES);
    scheduler.reset_prefix_cache();
    pool.check(0).unwrap();
    assert_eq!(pool.available(), PAGES);
}
