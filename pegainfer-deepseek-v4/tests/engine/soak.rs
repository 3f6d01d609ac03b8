//! Many steps of mixed load on two ranks, with cancelled and preempted requests: each text equals that of the request
//! alone, counters add up, and memory does not grow. `PEGAINFER_TEST_STEPS=10000` runs longer,
//! `PEGAINFER_TEST_DEVICE=cuda` on GPUs.

use crate::support::process::in_own_process;
use crate::support::{LoadOptions, RANKS, engine, fixture, greedy, invariance, options, rank_counts, run};
use pegainfer_core::engine::{GenerateRequest, RequestId, StepEngine, TokenEvent};
use pegainfer_core::rng;
use pegainfer_deepseek_v4::DeepSeekEngine;
use pegainfer_deepseek_v4::numerics::Numerics;
use std::collections::HashMap;

/// Default number of steps; `PEGAINFER_TEST_STEPS` overrides it.
const STEPS: u64 = 500;
/// Allowed growth of resident memory, for the allocator.
const MAX_GROWTH: u64 = 32 << 20;

/// Allowed growth of tensors: the lists of logit edits double when a step needs longer ones.
const MAX_LISTS: u64 = 64 << 10;

/// Open requests, and counts of all others.
#[derive(Default)]
struct Load {
    /// The number of its template, and the tokens so far.
    open: HashMap<RequestId, (usize, Vec<u32>)>,
    submitted: u64,
    finished: u64,
    cancelled: u64,
    tokens: u64,
}

/// Around the ends of pages; some share a prefix.
fn templates() -> Vec<GenerateRequest> {
    let cases = fixture().cases;
    let text = cases.iter().find(|case| case.name == "long_stories").unwrap().prompt_ids.clone();
    let short: Vec<_> = cases.into_iter().filter(|case| case.prompt_ids.len() < 100).take(3).collect();
    let mut templates = invariance::requests(&short, &[1, 3, 127, 128, 129], 12);
    // The longest texts grow to a third page, of four.
    let lengths = [(110, 150), (120, 140), (110, 150), (120, 140), (130, 24), (250, 12), (260, 12)];
    templates.extend(lengths.map(|(prompt, tokens)| greedy(&text[..prompt], tokens)));
    templates
}

impl Load {
    /// Submits or ends a request now and then, depending on the turn.
    fn change(&mut self, engine: &mut DeepSeekEngine, templates: &[GenerateRequest], turn: u64) {
        let draw = |what: u64, n: usize| rng::below(rng::bits(7, 4 * turn + what), n as u64) as usize;
        if self.open.len() < 12 && draw(0, 3) == 0 {
            let (id, template) = (RequestId(1000 + self.submitted), draw(1, templates.len()));
            engine.add(id, templates[template].clone());
            self.open.insert(id, (template, Vec::new()));
            self.submitted += 1;
        }
        if draw(2, 50) == 0 {
            let mut ids: Vec<RequestId> = self.open.keys().copied().collect();
            ids.sort_unstable();
            if !ids.is_empty() {
                let id = ids[draw(3, ids.len())];
                engine.cancel(id);
                self.open.remove(&id);
                self.cancelled += 1;
            }
        }
    }

    fn take(&mut self, id: RequestId, event: TokenEvent, expected: &[Vec<u32>]) {
        let Some((template, tokens)) = self.open.get_mut(&id) else { panic!("{id:?} got {event:?} after its end") };
        match event {
            TokenEvent::Token(token) => {
                tokens.push(token.id);
                self.tokens += 1;
                assert_eq!(tokens[..], expected[*template][..tokens.len()], "template {template}");
            }
            TokenEvent::Finished { .. } => {
                assert_eq!(*tokens, expected[*template], "template {template} ended early");
                self.open.remove(&id);
                self.finished += 1;
            }
            TokenEvent::Failed { error } | TokenEvent::GrammarFailed { error } => panic!("{id:?}: {error}"),
            TokenEvent::Admitted { .. } | TokenEvent::Prompt(_) | TokenEvent::Vector(_) => {}
        }
    }
}

/// Resident memory of this process in bytes; 0 if the system does not report it.
fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").ok();
    pages.and_then(|line| line.split(' ').nth(1)?.parse::<u64>().ok()).map_or(0, |pages| pages * 4096)
}

#[test]
fn mixed_load_with_cancels_leaks_nothing_and_changes_no_text() {
    in_own_process(soak);
}

fn soak() {
    let steps = std::env::var("PEGAINFER_TEST_STEPS").ok().and_then(|steps| steps.parse().ok()).unwrap_or(STEPS);
    let ranks = rank_counts(RANKS).first().copied().unwrap_or(1);
    let tight = LoadOptions {
        kv_cache_bytes: Some(4 * 83_000),
        max_num_batched_tokens: Some(64),
        max_num_mixed_tokens: 48,
        ..options(Numerics::REFERENCE)
    };
    let mut engine = engine(ranks, &tight);
    let templates = templates();
    let expected: Vec<Vec<u32>> =
        templates.iter().map(|request| run(&mut engine, std::slice::from_ref(request)).remove(0).ids()).collect();
    let before = engine.stats();
    let (mut load, mut memory, mut turn) = (Load::default(), Vec::new(), 0);
    let mut done = 0;
    while done < steps || engine.has_work() {
        if done < steps {
            load.change(&mut engine, &templates, turn);
        }
        let events = match engine.plan() {
            Some(admitted) => {
                engine.launch().unwrap();
                admitted
            }
            None if engine.has_work() => {
                engine.wait();
                engine.finish().unwrap()
            }
            None => Vec::new(),
        };
        events.into_iter().for_each(|(id, event)| load.take(id, event, &expected));
        (turn, done) = (turn + 1, engine.stats().steps - before.steps);
        if done >= [steps / 2, steps, u64::MAX][memory.len()] {
            memory.push((resident(), engine.executor().exec().allocated_bytes()));
        }
    }
    let stats = engine.stats();
    let Load { open, submitted, finished, cancelled, tokens } = load;
    println!(
        "{ranks} ranks, {done} steps, {submitted} requests, {cancelled} cancelled, {tokens} tokens, {memory:?}, {stats:?}"
    );
    assert!(open.is_empty() && submitted == finished + cancelled && cancelled > 0);
    assert_eq!((stats.running, stats.waiting, stats.kv_blocks_free), (0, 0, stats.kv_blocks_total));
    assert!(stats.preemptions > before.preemptions, "nothing was preempted");
    assert!(stats.prefix_hits > before.prefix_hits, "no prefix was found");
    // Includes unseen tokens of cancelled requests.
    assert!(stats.generation_tokens - before.generation_tokens >= tokens);
    let [(early, allocated), (late, allocated_late)] = memory[..] else { panic!("{memory:?}") };
    let tensors = allocated_late - allocated;
    assert!(late < early + MAX_GROWTH && tensors < MAX_LISTS, "memory grows: {memory:?}");
}
