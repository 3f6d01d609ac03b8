//! The engines behind a handle: where requests go, and where they go again after an engine is lost.

use super::cell::{EngineCell, Outgoing, Stopped};
use super::events::{Cancellation, EventSender};
use super::resubmission::{Engines, Resubmission};
use super::router::{Candidate, Choice, GroupLoad, Router};
use super::{EngineLimits, GenerateRequest, RequestId, SubmitError, TokenStream};
use crate::schedule::group;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard};
use std::sync::{Arc, PoisonError, Weak};

/// Why a request was sent to an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteReason {
    /// At least half of its prompt is cached there.
    Prefix,
    /// The cheapest engine has less of it in its cache.
    Load,
    /// Another choice of the same prompt is there.
    Choice,
    /// The client named the engine.
    Pinned,
    /// Its first engine was lost.
    Moved,
}

impl RouteReason {
    /// All reasons, in the order of [`RouteCounts`].
    pub const ALL: [Self; 5] = [Self::Prefix, Self::Load, Self::Choice, Self::Pinned, Self::Moved];

    /// Why the router sent a request to an engine that is expected to have `expected` tokens of its prompt.
    fn of(request: &GenerateRequest, expected: usize) -> Self {
        match request {
            GenerateRequest { engine: Some(_), .. } => Self::Pinned,
            GenerateRequest { same_prompt_as: Some(_), .. } => Self::Choice,
            _ if 2 * expected >= request.prompt.len() => Self::Prefix,
            _ => Self::Load,
        }
    }

    /// Its name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefix => "prefix",
            Self::Load => "load",
            Self::Choice => "choice",
            Self::Pinned => "pinned",
            Self::Moved => "moved",
        }
    }
}

/// Number of requests that an engine was sent, by reason.
pub type RouteCounts = [u64; RouteReason::ALL.len()];

/// What the engines of a handle share.
pub(super) struct Front {
    cells: Vec<EngineCell>,
    /// Number of the engine with the largest KV pool.
    largest: usize,
    /// Number of submitted requests, for their ids.
    submitted: AtomicU64,
    /// Locked for each request, so that the next one sees where this one went. Not used with one engine.
    routing: Mutex<Routing>,
}

/// State of the router.
struct Routing {
    router: Router,
    counts: Vec<RouteCounts>,
}

impl Front {
    /// The front of at least one engine.
    pub fn new(cells: Vec<EngineCell>) -> Self {
        let largest = (0..cells.len()).rev().max_by_key(|&i| cells[i].limits().kv_blocks).unwrap_or(0);
        let pools = cells.iter().map(|cell| cell.limits().kv_capacity_tokens());
        let routing = Routing { router: Router::new(pools), counts: vec![RouteCounts::default(); cells.len()] };
        Self { cells, largest, submitted: AtomicU64::new(0), routing: Mutex::new(routing) }
    }

    /// Takes the engines out of a front that is not used any more.
    pub fn take(mut self) -> Vec<EngineCell> {
        std::mem::take(&mut self.cells)
    }

    pub fn cells(&self) -> &[EngineCell] {
        &self.cells
    }

    pub fn limits(&self) -> &EngineLimits {
        self.cells[self.largest].limits()
    }

    pub fn routes(&self) -> Vec<RouteCounts> {
        self.routing().counts.clone()
    }

    /// As [`EngineHandle::check`](super::EngineHandle::check).
    pub fn check(&self, request: &GenerateRequest) -> Result<(), SubmitError> {
        let engines = self.cells.len();
        match request.engine {
            None => self.limits().check(request),
            Some(engine) => {
                let cell = self.cells.get(engine).ok_or(SubmitError::NoSuchEngine { engine, engines })?;
                cell.limits().check(request)
            }
        }
    }

    /// Queues a request on the engine that serves it at the lowest cost.
    pub fn submit(self: &Arc<Self>, request: GenerateRequest) -> Result<TokenStream, SubmitError> {
        self.check(&request)?;
        let now = self.cells[0].shared.clock.now();
        let (mut stream, events, cancellation) = TokenStream::new(RequestId(0), request.max_tokens, now);
        if let [cell] = &self.cells[..] {
            if request.only_if_cached {
                self.keep_cached(&request, &mut vec![self.candidate(0, &request)])?;
            }
            let id = self.id(0);
            cell.submit(Outgoing { id, request, uncomputed: None, events, cancellation })?;
            stream.set_id(id, 0);
            return Ok(stream);
        }
        let engines: Weak<Self> = Arc::downgrade(self);
        let resubmission = Resubmission::new(engines, &request);
        let placed = self.place(request.clone(), false, events, cancellation);
        if placed == Err(SubmitError::EngineStopped) && self.cells.iter().any(EngineCell::is_alive) {
            // The chosen engine stopped just now.
            return self.submit(request);
        }
        let (id, engine) = placed?;
        stream.set_id(id, engine);
        stream.set_resubmission(resubmission);
        Ok(stream)
    }

    /// Number of the engine that has the request with this id.
    fn engine(&self, id: RequestId) -> usize {
        (id.0 % self.cells.len() as u64) as usize
    }

    /// Id of the next request of this engine.
    fn id(&self, engine: usize) -> RequestId {
        let engines = self.cells.len() as u64;
        RequestId(self.submitted.fetch_add(1, Ordering::Relaxed) * engines + engine as u64)
    }

    /// Chooses an engine and queues the request there. Returns its id and engine.
    fn place(
        &self,
        request: GenerateRequest,
        moved: bool,
        events: EventSender,
        cancellation: Arc<Cancellation>,
    ) -> Result<(RequestId, usize), SubmitError> {
        // Long prompts take some 10 us here, so that is done before taking the lock.
        let mut candidates = self.candidates(&request)?;
        if request.only_if_cached && !moved {
            self.keep_cached(&request, &mut candidates)?;
        }
        let mut routing = self.routing();
        let Routing { router, counts } = &mut *routing;
        let queued = self.cells.iter().map(EngineCell::live).sum();
        if queued >= self.cells[0].shared.config.max_queued {
            return Err(SubmitError::QueueFull { queued });
        }
        let (now, block) = (self.cells[0].shared.clock.now(), self.limits().block_size);
        // Log-probabilities of the prompt need all of it computed.
        if request.prompt_logprobs.is_none() {
            router.expect(&request.prompt, request.prefix_root(), block, now, &mut candidates);
        }
        for candidate in &mut candidates {
            let uncached = request.prompt.len() - candidate.expected;
            let shared = &self.cells[candidate.engine].shared;
            candidate.before = GroupLoad::before(&shared.loads(), group(request.tenant), uncached);
        }
        let Choice { engine, expected, uncached } =
            router.choose(request.prompt.len(), &candidates).ok_or(SubmitError::EngineStopped)?;
        let reason = if moved { RouteReason::Moved } else { RouteReason::of(&request, expected) };
        let (prompt, root) = (request.prompt.clone(), request.prefix_root());
        let id = self.id(engine);
        let uncomputed = Some(uncached);
        self.cells[engine].submit(Outgoing { id, request, uncomputed, events, cancellation })?;
        router.sent(engine, root, prompt, now);
        counts[engine][reason as usize] += 1;
        Ok((id, engine))
    }

    /// The engines that can run a request: those that make progress and whose KV pool is large enough; if none makes
    /// progress, those that may again.
    fn candidates(&self, request: &GenerateRequest) -> Result<Vec<Candidate>, SubmitError> {
        if let Some(engine) = request.engine {
            let alive = self.cells.get(engine).is_some_and(EngineCell::is_alive);
            return if alive {
                Ok(vec![self.candidate(engine, request)])
            } else {
                Err(SubmitError::EngineLost { engine })
            };
        }
        let alive: Vec<usize> = (0..self.cells.len()).filter(|&i| self.cells[i].is_alive()).collect();
        let first = request.same_prompt_as.map(|first| self.engine(first)).filter(|first| alive.contains(first));
        if let Some(first) = first {
            return Ok(vec![self.candidate(first, request)]);
        }
        if alive.is_empty() {
            return Err(SubmitError::EngineStopped);
        }
        let fits = |engine: &usize| self.cells[*engine].limits().check_capacity(request);
        let holding: Vec<usize> = alive.iter().copied().filter(|engine| fits(engine).is_ok()).collect();
        let healthy = |engine: &usize| self.cells[*engine].is_healthy();
        let any_healthy = holding.iter().any(healthy);
        let chosen = holding.into_iter().filter(|engine| !any_healthy || healthy(engine));
        let candidates: Vec<Candidate> = chosen.map(|engine| self.candidate(engine, request)).collect();
        // The largest engine may be lost.
        if candidates.is_empty() { fits(&alive[0]).map(|()| candidates) } else { Ok(candidates) }
    }

    /// Keeps the engines whose prefix cache has the prompt up to its last block, of at least one.
    fn keep_cached(&self, request: &GenerateRequest, candidates: &mut Vec<Candidate>) -> Result<(), SubmitError> {
        let prompt = request.prompt.len();
        let needed = self.limits().tokens_before_last_block(prompt);
        let cached = candidates.iter().map(|candidate| candidate.cached).max().unwrap_or(0);
        if cached < needed {
            return Err(SubmitError::NotCached { cached, prompt });
        }
        candidates.retain(|candidate| candidate.cached >= needed);
        Ok(())
    }

    fn candidate(&self, engine: usize, request: &GenerateRequest) -> Candidate {
        let cell = &self.cells[engine];
        let uses_cache = request.prompt_logprobs.is_none();
        let cached = if uses_cache { cell.cached_tokens(request) } else { 0 };
        Candidate {
            engine,
            cached,
            expected: cached,
            before: GroupLoad::default(),
            capacity: cell.limits().max_num_seqs.max(1),
        }
    }

    /// As [`EngineHandle::reset_prefix_cache`](super::EngineHandle::reset_prefix_cache).
    pub async fn reset_prefix_caches(&self) -> Result<(), SubmitError> {
        let running = self.cells.iter().filter(|cell| self.cells.len() == 1 || cell.is_alive());
        let waiting = running.map(EngineCell::reset_prefix_cache).collect::<Result<Vec<_>, _>>()?;
        let mut any = false;
        for done in waiting {
            any |= done.await.is_ok();
        }
        self.routing().router.clear();
        // An engine that was lost meanwhile has no cache any more.
        if any { Ok(()) } else { Err(SubmitError::EngineStopped) }
    }

    fn routing(&self) -> MutexGuard<'_, Routing> {
        // The guarded value is plain data: a panic elsewhere cannot leave it half-written.
        self.routing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engines for Front {
    fn has_lost(&self, id: RequestId) -> bool {
        !self.cells[self.engine(id)].is_alive()
    }

    fn resubmit(
        &self,
        request: GenerateRequest,
        events: EventSender,
        cancellation: Arc<Cancellation>,
    ) -> Option<(RequestId, usize)> {
        self.place(request, true, events, cancellation).ok()
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        let stopped: Vec<Arc<Stopped>> = self.cells.iter().map(|cell| cell.stopped().clone()).collect();
        // All inboxes close before the first wait, so that the engines stop at the same time.
        self.cells.clear();
        drop(stopped);
    }
}
