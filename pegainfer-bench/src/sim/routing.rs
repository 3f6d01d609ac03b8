//! The engines of a simulation, and the router that serves use too.

use super::device::SimulatedDevice;
use pegainfer_core::engine::router::{Candidate, Choice, GroupLoad, Router};
use pegainfer_core::engine::{GenerateRequest, RequestId, StepEngine, TokenEvent};
use pegainfer_core::schedule::{EngineCore, SequenceState};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// An engine of a simulation.
pub type SimulatedEngine<S> = EngineCore<SimulatedDevice<S>>;

/// Engines of the same size, each with its own device and clock.
pub struct Engines<S: SequenceState> {
    /// The engines.
    pub all: Vec<SimulatedEngine<S>>,
    round_robin: bool,
    /// Number of routed requests.
    routed: usize,
    router: Router,
    /// Load of each engine.
    loads: Vec<GroupLoad>,
    /// The engine of each open request, and the tokens to compute before its first token.
    open: HashMap<RequestId, (usize, usize)>,
}

impl<S: SequenceState> Engines<S> {
    /// Idle engines. With `round_robin`, they get requests in turn, instead of by prefix and load.
    pub fn new(all: Vec<SimulatedEngine<S>>, round_robin: bool) -> Self {
        let (loads, pools) =
            (vec![GroupLoad::default(); all.len()], all.iter().map(|engine| engine.limits().kv_capacity_tokens()));
        let router = Router::new(pools);
        Self { all, round_robin, routed: 0, router, loads, open: HashMap::new() }
    }

    /// Latest time of the engines' clocks.
    pub fn latest(&mut self) -> Duration {
        self.all.iter_mut().map(|engine| engine.executor().elapsed()).max().unwrap_or_default()
    }

    /// The engine with work whose clock is the earliest, and its time.
    pub fn next_busy(&mut self) -> Option<(Duration, usize)> {
        let busy = self.all.iter_mut().enumerate().filter(|(_, engine)| engine.has_work());
        busy.map(|(i, engine)| (engine.executor().elapsed(), i)).min()
    }

    /// Lets every idle engine wait until `at`.
    pub fn wait_until(&mut self, at: Duration) {
        let idle = self.all.iter_mut().filter(|engine| !engine.has_work());
        idle.for_each(|engine| engine.executor().wait_until(at));
    }

    /// Sends a request that arrives at `at` to one of the engines.
    pub fn add(&mut self, id: RequestId, request: GenerateRequest, at: Duration) {
        let now = self.all[0].executor().instant(at);
        let (engine, tokens) = self.choose(&request, now);
        self.router.sent(engine, request.cache_salt, request.prompt.clone(), now);
        let load = &mut self.loads[engine];
        (load.requests, load.tokens) = (load.requests + 1, load.tokens + tokens);
        self.open.insert(id, (engine, tokens));
        self.routed += 1;
        self.all[engine].add(id, request);
    }

    /// The engine for a request, and the tokens that it has to compute there.
    fn choose(&mut self, request: &GenerateRequest, now: Instant) -> (usize, usize) {
        let prompt = &request.prompt;
        let candidate = |(engine, core): (usize, &SimulatedEngine<S>)| {
            let cached = core.pool().map_or(0, |pool| pool.cached_prefix(request.cache_salt, prompt));
            let capacity = core.scheduler().config().max_num_seqs;
            Candidate { engine, cached, expected: cached, before: self.loads[engine], capacity }
        };
        if self.all.len() == 1 {
            return (0, 0);
        }
        let mut candidates: Vec<Candidate> = self.all.iter().enumerate().map(candidate).collect();
        if self.round_robin {
            let engine = self.routed % self.all.len();
            return (engine, prompt.len() - candidates[engine].cached);
        }
        let block = self.all[0].limits().block_size;
        self.router.expect(prompt, request.cache_salt, block, now, &mut candidates);
        let choice = self.router.choose(prompt.len(), &candidates);
        choice.map_or((0, 0), |Choice { engine, uncached, .. }| (engine, uncached))
    }

    /// Updates the load of an engine after an event of one of its requests.
    pub fn see(&mut self, id: RequestId, event: &TokenEvent) {
        let Some((engine, tokens)) = self.open.get_mut(&id) else { return };
        let (load, ended) = (&mut self.loads[*engine], matches!(event, TokenEvent::Finished { .. }));
        if matches!(event, TokenEvent::Token(_)) || ended {
            load.tokens -= std::mem::take(tokens);
        }
        if ended {
            load.requests -= 1;
            self.open.remove(&id);
        }
    }
}
