//! Chooses the engine of a request, for data parallel: several engines of one model behind one queue.
//!
//! A request goes to the engine with the lowest cost, in prompt tokens:
//!
//! ```text
//! cost = uncached + tokens before it + BALANCE * requests before it / capacity + MEMORY_BALANCE * demand / pool
//! ```
//!
//! - `uncached`: tokens of its prompt that this engine would have to compute.
//! - `tokens before it`: prompt tokens that the engine computes first ([`GroupLoad::before`]).
//! - `requests before it / capacity`: open requests, as a fraction of those that run at the same time.
//! - `demand / pool`: prompt tokens that were sent to the engine lately, as a fraction of its KV pool ([`Router::sent`]).
//!   Without this term, idle engines of 64 conversations have 36 and 28 of them, and the first one evicts prefixes while
//!   the other one has memory left.
//!
//! The first term keeps the turns of a conversation together, the others spread a popular prefix over the engines once
//! waiting for it costs more than computing it again. Tokens are the unit because all engines have the same model and
//! kind of device: the time per token is the same for all and cancels out. A slower engine has a longer queue.
//!
//! The prefix cache has only computed prompts. The router therefore also remembers prompts that it sent recently, so
//! that a second request with the same prompt follows the first one. Such a prefix counts neither as `uncached` nor
//! as tokens before it: waiting for it takes no longer than computing it again.
//!
//! Everything here is pure: no clock, no thread, no lock.

use crate::kv::PrefixRoot;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Cost of an engine with as many open requests as it runs at the same time, in prompt tokens. One more open request in
/// an engine for 256 costs 64 tokens: about 1 ms of prefill of Qwen3-4B on an H200, for a step that takes 0.05 ms
/// longer.
const BALANCE: usize = 16_384;
/// Cost of an engine whose KV pool is as large as the prompts that it was sent lately, in prompt tokens. In simulations
/// of 64 conversations, a quarter of this or four times as much finds fewer prefixes.
const MEMORY_BALANCE: usize = 4096;
/// Time for which a sent prompt counts as cached. Longer than a queue usually is.
const REMEMBERED_FOR: Duration = Duration::from_secs(10);
/// Maximum number of remembered prompts, and of their tokens together.
const MAX_REMEMBERED: usize = 256;
const MAX_REMEMBERED_TOKENS: usize = 1 << 20;
/// Maximum number of tokens that are compared with remembered prompts for one request: 1 MB of each.
const MAX_COMPARED: usize = 1 << 18;

/// One engine that can run a request, as seen by the router.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Number of the engine.
    pub engine: usize,
    /// Tokens of the prompt in its prefix cache.
    pub cached: usize,
    /// Tokens of the prompt in its prefix cache or in a prompt that was sent there recently, at least `cached`.
    pub expected: usize,
    /// The part of its load that goes before the request.
    pub before: GroupLoad,
    /// Maximum number of running requests, at least 1.
    pub capacity: usize,
}

impl Candidate {
    /// Cost of a request with `prompt` tokens on this engine, in prompt tokens.
    pub fn cost(&self, prompt: usize) -> usize {
        let tokens = self.before.tokens.saturating_sub(self.expected - self.cached);
        prompt.saturating_sub(self.expected) + tokens + BALANCE * self.before.requests / self.capacity
    }
}

/// Load of an engine by the requests of one group of tenants.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupLoad {
    /// Open requests, running or waiting.
    pub requests: usize,
    /// Prompt tokens that are predicted to be computed before the first tokens of these requests.
    pub tokens: usize,
}

impl GroupLoad {
    /// The part of an engine's `loads` that goes before a new request of `group` with `uncached` tokens. Groups take
    /// turns, so another group goes first with at most as much as this group has with the request. A group that fills
    /// one engine is thereby sent to the others, where its turn comes sooner: its share is counted over all engines.
    pub fn before(loads: &BTreeMap<u32, Self>, group: u32, uncached: usize) -> Self {
        let own = loads.get(&group).copied().unwrap_or_default();
        let most = Self { requests: own.requests + 1, tokens: own.tokens + uncached };
        let others = loads.iter().filter(|(other, _)| **other != group).map(|(_, load)| load);
        others.fold(own, |sum, load| Self {
            requests: sum.requests + load.requests.min(most.requests),
            tokens: sum.tokens + load.tokens.min(most.tokens),
        })
    }
}

/// The decision for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Number of the engine.
    pub engine: usize,
    /// Tokens of the prompt that are expected in its prefix cache.
    pub expected: usize,
    /// Tokens that have to be computed.
    pub uncached: usize,
}

/// The router's memory between requests.
#[derive(Debug)]
pub struct Router {
    /// Tokens of the KV pool of each engine, at least 1.
    pools: Vec<usize>,
    /// Prompt tokens that each engine was sent lately: of a window as large as all pools together.
    demand: Vec<f64>,
    /// Recently sent prompts, newest first.
    sent: VecDeque<SentPrompt>,
    /// Their tokens.
    tokens: usize,
    /// Engine after the last one that was chosen; the first in a tie.
    next: usize,
}

/// A prompt that was sent to an engine.
#[derive(Debug)]
struct SentPrompt {
    engine: usize,
    root: PrefixRoot,
    prompt: Arc<[u32]>,
    until: Instant,
}

impl Router {
    /// The router of engines with KV pools of these sizes, in tokens.
    pub fn new(pools: impl IntoIterator<Item = usize>) -> Self {
        let pools: Vec<usize> = pools.into_iter().map(|tokens| tokens.max(1)).collect();
        Self { demand: vec![0.0; pools.len()], pools, sent: VecDeque::new(), tokens: 0, next: 0 }
    }

    /// Sets the expected tokens of the candidates from their cached tokens and the remembered prompts. Only whole blocks
    /// of `block` tokens count, and at most all tokens but the last.
    pub fn expect(
        &mut self,
        prompt: &[u32],
        root: impl Into<PrefixRoot>,
        block: usize,
        now: Instant,
        candidates: &mut [Candidate],
    ) {
        let root = root.into();
        self.forget_before(now);
        let most = prompt.len().saturating_sub(1);
        let mut compared = 0;
        candidates.iter_mut().for_each(|candidate| candidate.expected = candidate.cached);
        for sent in self.sent.iter().filter(|sent| sent.root == root) {
            let Some(candidate) = candidates.iter_mut().find(|candidate| candidate.engine == sent.engine) else {
                continue;
            };
            // Compare the block that would have to be equal, before all those that precede it.
            let next = candidate.expected - candidate.expected % block;
            let differs = sent.prompt.get(next..next + block).is_none_or(|tokens| !prompt[next..].starts_with(tokens));
            if differs || candidate.expected >= most {
                continue;
            }
            let common = common_prefix(prompt, &sent.prompt, block);
            compared += common;
            candidate.expected = candidate.expected.max(common.min(most));
            if compared > MAX_COMPARED {
                return;
            }
        }
    }

    /// The candidate with the lowest cost for a prompt of `prompt` tokens. Ties go to the fewest open requests, then
    /// round. `None` without candidates.
    pub fn choose(&mut self, prompt: usize, candidates: &[Candidate]) -> Option<Choice> {
        let engines = self.pools.len();
        let memory = |engine: usize| MEMORY_BALANCE as f64 * self.demand[engine] / self.pools[engine] as f64;
        let turn = |engine: usize| (engine + engines - self.next % engines) % engines;
        let order =
            |one: &&Candidate| (one.cost(prompt) + memory(one.engine) as usize, one.before.requests, turn(one.engine));
        let Candidate { engine, expected, .. } = *candidates.iter().min_by_key(order)?;
        self.next = engine + 1;
        Some(Choice { engine, expected, uncached: prompt.saturating_sub(expected) })
    }

    /// Remembers that a prompt was sent to an engine, and adds its tokens to the engine's demand. Older prompts count less
    /// the more tokens were sent since.
    pub fn sent(&mut self, engine: usize, root: impl Into<PrefixRoot>, prompt: Arc<[u32]>, now: Instant) {
        let window: usize = self.pools.iter().sum();
        let kept = (1.0 - prompt.len() as f64 / window as f64).max(0.0);
        self.demand.iter_mut().for_each(|demand| *demand *= kept);
        self.demand[engine] += prompt.len() as f64;
        self.tokens += prompt.len();
        self.sent.push_front(SentPrompt { engine, root: root.into(), prompt, until: now + REMEMBERED_FOR });
        while self.sent.len() > MAX_REMEMBERED || (self.tokens > MAX_REMEMBERED_TOKENS && self.sent.len() > 1) {
            self.forget_oldest();
        }
    }

    /// Forgets all prompts, because the prefix caches were cleared.
    pub fn clear(&mut self) {
        (self.sent, self.tokens) = (VecDeque::new(), 0);
        self.demand.fill(0.0);
    }

    fn forget_before(&mut self, now: Instant) {
        while self.sent.back().is_some_and(|sent| sent.until <= now) {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        if let Some(sent) = self.sent.pop_back() {
            self.tokens -= sent.prompt.len();
        }
    }
}

/// Length of the common prefix of two prompts, in whole blocks of `block` tokens.
fn common_prefix(one: &[u32], other: &[u32], block: usize) -> usize {
    let blocks = one.chunks_exact(block).zip(other.chunks_exact(block));
    blocks.take_while(|(one, other)| one == other).count() * block
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Candidate =
        Candidate { engine: 0, cached: 0, expected: 0, before: GroupLoad { requests: 0, tokens: 0 }, capacity: 256 };

    /// An engine with this load.
    fn loaded(engine: usize, requests: usize, tokens: usize) -> Candidate {
        Candidate { engine, before: GroupLoad { requests, tokens }, ..IDLE }
    }

    /// The router of three engines.
    fn router() -> Router {
        Router::new([1000, 1000, 1000])
    }

    /// The choice between an idle engine 0 and `other`.
    fn choose(prompt: usize, one: Candidate, other: Candidate) -> usize {
        router().choose(prompt, &[one, other]).unwrap().engine
    }

    #[test]
    fn the_cheapest_engine_is_chosen() {
        let cached = |tokens: usize, one: Candidate| Candidate { cached: tokens, expected: tokens, ..one };
        assert_eq!(choose(4096, IDLE, cached(4080, loaded(1, 0, 0))), 1, "its prefix is cached");
        assert_eq!(choose(4096, IDLE, cached(4080, loaded(1, 1, 5000))), 0, "waiting costs more");
        let computing = Candidate { expected: 4080, ..loaded(1, 1, 4096) };
        assert_eq!(choose(4096, IDLE, computing), 1, "its prefix is being computed");
        assert_eq!(choose(4096, IDLE, cached(1024, loaded(1, 10, 0))), 1);
        assert_eq!(choose(4096, IDLE, cached(1024, loaded(1, 20, 0))), 0, "a popular prefix spreads");
        assert_eq!(choose(64, loaded(0, 0, 100), loaded(1, 0, 0)), 1, "less waits");
        let large = Candidate { capacity: 100_000, ..loaded(0, 1, 0) };
        assert_eq!(choose(64, large, loaded(1, 0, 0)), 1, "a tie goes to the fewest open requests");
        assert_eq!(router().choose(64, &[]), None);
    }

    #[test]
    fn equal_engines_take_turns() {
        let engines: Vec<Candidate> = (0..3).map(|engine| loaded(engine, 0, 0)).collect();
        let mut router = router();
        let mut turns = |engines: &[Candidate]| router.choose(64, engines).unwrap().engine;
        assert_eq!([(); 5].map(|()| turns(&engines)), [0, 1, 2, 0, 1]);
        assert_eq!([(); 3].map(|()| turns(&engines[..2])), [0, 1, 0], "engine 2 is lost");
    }

    #[test]
    fn groups_of_tenants_wait_for_their_turns_only() {
        let load = |requests, tokens| GroupLoad { requests, tokens };
        let loads = BTreeMap::from([(1, load(500, 50_000)), (2, load(3, 300))]);
        assert_eq!(GroupLoad::before(&loads, 1, 100), load(503, 50_300));
        assert_eq!(GroupLoad::before(&loads, 2, 100), load(3 + 4, 300 + 400), "the flood goes first with as much");
        assert_eq!(GroupLoad::before(&loads, 3, 100), load(1 + 1, 100 + 100));
        assert_eq!(GroupLoad::before(&BTreeMap::new(), 3, 100), load(0, 0));
    }

    #[test]
    fn a_prompt_that_was_just_sent_is_expected() {
        let now = Instant::now();
        let prompt: Vec<u32> = (0..100).collect();
        let mut router = router();
        router.sent(1, 7, prompt.clone().into(), now);
        let mut expect = |prompt: &[u32], salt, at, cached| {
            let mut candidates = [IDLE, Candidate { cached, ..loaded(1, 0, 0) }];
            router.expect(prompt, salt, 16, at, &mut candidates);
            candidates.map(|candidate| candidate.expected)
        };
        assert_eq!(expect(&prompt, 7, now, 0), [0, 96]);
        assert_eq!(expect(&prompt, 7, now, 32), [0, 96], "its first blocks are computed");
        assert_eq!(expect(&prompt[..64], 7, now, 0), [0, 63], "one token is computed");
        assert_eq!(expect(&prompt[..10], 7, now, 0), [0, 0], "less than a block");
        assert_eq!(expect(&[&prompt[..40], &[1; 60]].concat(), 7, now, 0), [0, 32]);
        assert_eq!(expect(&prompt, 8, now, 0), [0, 0], "another salt");
        assert_eq!(expect(&prompt, 8, now, 48), [0, 48]);
        assert_eq!(expect(&prompt, 7, now + REMEMBERED_FOR, 0), [0, 0], "too long ago");
    }

    #[test]
    fn conversations_are_spread_by_the_memory_that_they_take() {
        let (mut router, now) = (Router::new([50_000; 2]), Instant::now());
        let engines = [loaded(0, 0, 0), loaded(1, 0, 0)];
        (0..3).for_each(|_| router.sent(0, 0, vec![1; 2000].into(), now));
        assert_eq!([(); 2].map(|()| router.choose(100, &engines).unwrap().engine), [1, 1], "engine 0 has three");
        let cached = Candidate { cached: 1000, expected: 1000, ..engines[0] };
        assert_eq!(router.choose(1100, &[cached, engines[1]]).unwrap().engine, 0, "its prefix is worth more");
        (0..60).for_each(|i| router.sent(i % 2, 0, vec![1; 2000].into(), now));
        let demand = router.demand.iter().sum::<f64>();
        assert!((50_000.0..100_000.0).contains(&demand), "{demand}");
        assert!((router.demand[0] / router.demand[1] - 1.0).abs() < 0.1, "the first three are forgotten");
    }

    #[test]
    fn memory_is_bounded() {
        let (mut router, now) = (router(), Instant::now());
        (0..1000).for_each(|_| router.sent(0, 0, vec![1; 32].into(), now));
        assert_eq!((router.sent.len(), router.tokens), (MAX_REMEMBERED, 32 * MAX_REMEMBERED));
        (0..9).for_each(|_| router.sent(0, 0, vec![1; MAX_REMEMBERED_TOKENS / 4].into(), now));
        assert_eq!((router.sent.len(), router.tokens), (4, MAX_REMEMBERED_TOKENS));
        router.clear();
        assert_eq!((router.sent.len(), router.tokens), (0, 0));
    }
}
