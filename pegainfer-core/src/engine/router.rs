//! Chooses the engine of a request, for data parallel: several engines of one model behind one queue.
//!
//! A request goes to the engine with the lowest cost, in prompt tokens:
//!
//! ```text
//! cost = uncached + ahead + BALANCE * live / capacity
//! ```
//!
//! - `uncached`: tokens of its prompt that this engine would have to compute.
//! - `ahead`: prompt tokens that the engine computes before it ([`ahead`]).
//! - `live / capacity`: the engine's open requests, as a fraction of those that run at the same time.
//!
//! The first term keeps the turns of a conversation together, the others spread a popular prefix over the engines once
//! waiting for it costs more than computing it again. Tokens are the unit because all engines have the same model and
//! kind of device: the time per token is the same for all and cancels out. A slower engine has a longer queue.
//!
//! The prefix cache has only computed prompts. The router therefore also remembers prompts that it sent recently, so
//! that a second request with the same prompt follows the first one.
//!
//! Everything here is pure: no clock, no thread, no lock.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Cost of an engine with as many open requests as it runs at the same time, in prompt tokens. One more open request in
/// an engine for 256 costs 64 tokens: about 1 ms of prefill of Qwen3-4B on an H200, for a step that takes 0.05 ms
/// longer.
const BALANCE: usize = 16_384;
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
    /// Prompt tokens that it computes before the request.
    pub ahead: usize,
    /// Its open requests, running or waiting.
    pub live: usize,
    /// Maximum number of running requests, at least 1.
    pub capacity: usize,
}

impl Candidate {
    /// Cost of a request with `prompt` tokens on this engine, in prompt tokens.
    pub fn cost(&self, prompt: usize) -> usize {
        prompt.saturating_sub(self.cached) + self.ahead + BALANCE * self.live / self.capacity
    }
}

/// Prompt tokens that an engine computes before a request of `group` with `uncached` tokens. `queued` has the prompt
/// tokens that each group of tenants has to compute there. Groups take turns, so another group goes first with at most
/// as many tokens as this group has with the request. A group that fills one engine is thereby sent to the others,
/// where its turn comes sooner: its share is counted over all engines.
pub fn ahead(queued: &BTreeMap<u32, usize>, group: u32, uncached: usize) -> usize {
    let own = queued.get(&group).copied().unwrap_or(0);
    let others = queued.iter().filter(|(other, _)| **other != group);
    own + others.map(|(_, tokens)| (*tokens).min(own + uncached)).sum::<usize>()
}

/// The decision for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Number of the engine.
    pub engine: usize,
    /// Tokens of the prompt that are predicted not to be computed there.
    pub cached: usize,
    /// Tokens that have to be computed.
    pub uncached: usize,
}

/// The router's memory between requests.
#[derive(Debug, Default)]
pub struct Router {
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
    salt: u64,
    prompt: Arc<[u32]>,
    until: Instant,
}

impl Router {
    /// Adds remembered prompts to the cached tokens of the candidates. Only whole blocks of `block` tokens count, and
    /// at most all tokens but the last.
    pub fn credit(&mut self, prompt: &[u32], salt: u64, block: usize, now: Instant, candidates: &mut [Candidate]) {
        self.forget_before(now);
        let most = prompt.len().saturating_sub(1);
        let mut compared = 0;
        for sent in self.sent.iter().filter(|sent| sent.salt == salt) {
            let Some(candidate) = candidates.iter_mut().find(|candidate| candidate.engine == sent.engine) else {
                continue;
            };
            // Compare the block that would have to be equal, before all those that precede it.
            let next = candidate.cached - candidate.cached % block;
            let differs = sent.prompt.get(next..next + block).is_none_or(|tokens| !prompt[next..].starts_with(tokens));
            if differs || candidate.cached >= most {
                continue;
            }
            let common = common_prefix(prompt, &sent.prompt, block);
            compared += common;
            candidate.cached = candidate.cached.max(common.min(most));
            if compared > MAX_COMPARED {
                return;
            }
        }
    }

    /// The candidate with the lowest cost for a prompt of `prompt` tokens. Ties go to the fewest open requests, then
    /// round. `None` without candidates.
    pub fn choose(&mut self, prompt: usize, candidates: &[Candidate]) -> Option<Choice> {
        let engines = candidates.iter().map(|candidate| candidate.engine + 1).max()?;
        let turn = |engine: usize| (engine + engines - self.next % engines) % engines;
        let order = |one: &&Candidate| (one.cost(prompt), one.live, turn(one.engine));
        let Candidate { engine, cached, .. } = *candidates.iter().min_by_key(order)?;
        self.next = engine + 1;
        Some(Choice { engine, cached, uncached: prompt.saturating_sub(cached) })
    }

    /// Remembers that a prompt was sent to an engine.
    pub fn sent(&mut self, engine: usize, salt: u64, prompt: Arc<[u32]>, now: Instant) {
        self.tokens += prompt.len();
        self.sent.push_front(SentPrompt { engine, salt, prompt, until: now + REMEMBERED_FOR });
        while self.sent.len() > MAX_REMEMBERED || (self.tokens > MAX_REMEMBERED_TOKENS && self.sent.len() > 1) {
            self.forget_oldest();
        }
    }

    /// Forgets all prompts, because the prefix caches were cleared.
    pub fn clear(&mut self) {
        (self.sent, self.tokens) = (VecDeque::new(), 0);
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

    const IDLE: Candidate = Candidate { engine: 0, cached: 0, ahead: 0, live: 0, capacity: 256 };

    fn choose(prompt: usize, candidates: &[Candidate]) -> usize {
        Router::default().choose(prompt, candidates).unwrap().engine
    }

    #[test]
    fn the_cheapest_engine_is_chosen() {
        let other = Candidate { engine: 1, ..IDLE };
        assert_eq!(choose(4096, &[IDLE, Candidate { cached: 4080, ..other }]), 1, "its prefix is cached");
        assert_eq!(choose(4096, &[IDLE, Candidate { cached: 4080, ahead: 5000, ..other }]), 0, "waiting costs more");
        assert_eq!(choose(4096, &[IDLE, Candidate { cached: 1024, live: 10, ..other }]), 1);
        assert_eq!(choose(4096, &[IDLE, Candidate { cached: 1024, live: 20, ..other }]), 0, "a prefix spreads");
        assert_eq!(choose(64, &[Candidate { ahead: 100, ..IDLE }, other]), 1, "less waits");
        assert_eq!(choose(64, &[Candidate { live: 1, capacity: 100_000, ..IDLE }, other]), 1, "a tie: fewest open");
        assert_eq!(Router::default().choose(64, &[]), None);
    }

    #[test]
    fn equal_engines_take_turns() {
        let engines: Vec<Candidate> = (0..3).map(|engine| Candidate { engine, ..IDLE }).collect();
        let mut router = Router::default();
        let mut turns = |engines: &[Candidate]| router.choose(64, engines).unwrap().engine;
        assert_eq!([(); 5].map(|()| turns(&engines)), [0, 1, 2, 0, 1]);
        assert_eq!([(); 3].map(|()| turns(&engines[..2])), [0, 1, 0], "engine 2 is lost");
    }

    #[test]
    fn groups_of_tenants_wait_for_their_turns_only() {
        let queued = BTreeMap::from([(1, 50_000), (2, 300)]);
        assert_eq!(ahead(&queued, 1, 100), 50_000 + 300);
        assert_eq!(ahead(&queued, 2, 100), 300 + 400, "the flood goes first with as many tokens");
        assert_eq!(ahead(&queued, 3, 100), 100 + 100);
        assert_eq!(ahead(&BTreeMap::new(), 3, 100), 0);
    }

    #[test]
    fn a_prompt_that_was_just_sent_counts_as_cached() {
        let now = Instant::now();
        let prompt: Vec<u32> = (0..100).collect();
        let mut router = Router::default();
        router.sent(1, 7, prompt.clone().into(), now);
        let mut credit = |prompt: &[u32], salt, at, cached| {
            let mut candidates = [IDLE, Candidate { engine: 1, cached, ..IDLE }];
            router.credit(prompt, salt, 16, at, &mut candidates);
            candidates.map(|candidate| candidate.cached)
        };
        assert_eq!(credit(&prompt, 7, now, 0), [0, 96]);
        assert_eq!(credit(&prompt, 7, now, 32), [0, 96], "its first blocks are computed");
        assert_eq!(credit(&prompt[..64], 7, now, 0), [0, 63], "one token is computed");
        assert_eq!(credit(&prompt[..10], 7, now, 0), [0, 0], "less than a block");
        assert_eq!(credit(&[&prompt[..40], &[1; 60]].concat(), 7, now, 0), [0, 32]);
        assert_eq!(credit(&prompt, 8, now, 0), [0, 0], "another salt");
        assert_eq!(credit(&prompt, 7, now + REMEMBERED_FOR, 0), [0, 0], "too long ago");
    }

    #[test]
    fn memory_is_bounded() {
        let (mut router, now) = (Router::default(), Instant::now());
        (0..1000).for_each(|_| router.sent(0, 0, vec![1; 32].into(), now));
        assert_eq!((router.sent.len(), router.tokens), (MAX_REMEMBERED, 32 * MAX_REMEMBERED));
        (0..9).for_each(|_| router.sent(0, 0, vec![1; MAX_REMEMBERED_TOKENS / 4].into(), now));
        assert_eq!((router.sent.len(), router.tokens), (4, MAX_REMEMBERED_TOKENS));
        router.clear();
        assert_eq!((router.sent.len(), router.tokens), (0, 0));
    }
}
