//! One random world: an engine with its loop and demultiplexer, its clients, and its faults.

use super::client::{Client, End, Pace, Work};
use super::executor::{Orders, Spoil, VirtualDevice, Watch, compute_masks};
use super::fault::{Allowed, Fault, Faults};
use super::report::Report;
use super::tap::Tap;
use crate::device::Device;
use crate::drafts::Oracle;
use crate::kinds::StepOf;
use crate::requests::{EOS, Rng, VOCAB};
use pegainfer_core::engine::simulation::{SimulatedEngine, Turn};
use pegainfer_core::engine::{EngineConfig, EngineHandle, EngineLimits, SimulatedClock, SubmitError};
use pegainfer_core::schedule::{EngineCore, TokenBudget};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Maximum number of consecutive turns in which an engine with work launches and finishes nothing.
const MAX_IDLE_TURNS: usize = 2000;
/// Turns after the last request.
const MAX_DRAIN_TURNS: usize = 100_000;

/// A pending reset of the prefix cache.
type Reset = Pin<Box<dyn Future<Output = Result<(), SubmitError>>>>;

/// An engine, its clients and its faults, all drawn from the seed.
pub struct World<K: Spoil + Send + 'static> {
    pub(super) rng: Rng,
    pub(super) faults: Faults,
    /// Works that clients choose from.
    pub(super) works: Vec<Work>,
    pub(super) config: EngineConfig,
    pub(super) start: Instant,
    pub(super) clock: SimulatedClock,
    /// The last handle; `None` once it is dropped.
    pub(super) handle: Option<EngineHandle>,
    pub(super) engine: SimulatedEngine<Tap<K>>,
    pub(super) clients: Vec<Client>,
    pub(super) resets: Vec<Reset>,
    /// When the engine last went on, or got its first request.
    pub(super) busy_since: Instant,
    /// Percent: how often a request comes.
    pub(super) arrivals: usize,
    arriving: bool,
    /// Requests that came during the last turn.
    pub(super) arrived_in_turn: usize,
    /// Something came to the engine since its last turn began.
    pub(super) woken: bool,
    /// Turns in a row without a step.
    idle: usize,
    pub(super) report: Report,
}

impl<K: Spoil + Send + 'static> World<K>
where
    StepOf<K>: Send,
{
    pub fn new(seed: u64, allowed: &Allowed) -> Self {
        let mut rng = Rng(seed);
        let mut faults = Faults::new(seed, allowed);
        let blocks = 2 + rng.below(K::BLOCKS - 2);
        let limits = EngineLimits {
            max_model_len: 16 + rng.below(100 * K::SCALE),
            vocab_size: VOCAB as usize,
            block_size: K::BLOCK_TOKENS,
            kv_blocks: blocks,
            kv_cache_dtype: "bf16",
            max_num_seqs: 1 + rng.below(8),
            eos_token_ids: vec![EOS],
            num_speculative_tokens: None,
            image_token: None,
            unsupported: &[],
            max_loras: 0,
            hidden_size: 0,
        };
        let works = (0..100).filter_map(|_| {
            let broken = faults.happens(Fault::BrokenMask, 500);
            Work::new(&mut rng, &limits, K::SCALE, broken)
        });
        let works = works.take(16).collect();
        let oracle = Oracle::new(&mut rng);
        let speculation = (K::DRAFTS && rng.chance(20)).then(|| oracle.speculation(&mut rng));
        let tokens =
            TokenBudget { step: limits.max_num_seqs + rng.below(64 * K::SCALE), mixed: rng.below(64 * K::SCALE) };
        let (state, states) = K::new(&mut rng, limits.max_num_seqs);
        let device = Device {
            kv: vec![0; blocks * K::BLOCK_TOKENS],
            kv_adapters: vec![None; blocks * K::BLOCK_TOKENS],
            states,
            sampled: vec![],
            counts: Default::default(),
            oracle,
        };
        let start = Instant::now();
        let clock = SimulatedClock::new(start);
        let executor = VirtualDevice::new(device, clock.clone(), 1 + rng.below(2));
        let engine = Tap::new(EngineCore::new(executor, limits, tokens, state, speculation));
        let config = EngineConfig {
            max_queued: 1 + rng.below(24),
            step_deadline: Duration::from_millis(5),
            ..EngineConfig::default()
        };
        let (handle, engine) = SimulatedEngine::new(engine, config);
        Self {
            faults,
            works,
            config,
            start,
            clock,
            handle: Some(handle),
            engine,
            clients: Vec::new(),
            resets: Vec::new(),
            busy_since: start,
            arrivals: 5 + rng.below(40),
            arriving: true,
            arrived_in_turn: 0,
            woken: false,
            idle: 0,
            report: Report::default(),
            rng,
        }
    }

    /// Requests come for `turns` turns, unless a fault ends that before; then all that came end.
    pub fn run(mut self, turns: usize) -> Report {
        let mut last = Turn::Next;
        while last != Turn::Over {
            self.arriving = self.report.turns < turns;
            if self.arriving {
                self.submit_all();
                self.reset();
                self.drain();
            } else if last == Turn::Idle && self.arrived_in_turn == 0 {
                self.check_idle();
                self.handle = None;
                self.woken = true;
            }
            self.clients_act();
            self.pass_time();
            self.report.turns += 1;
            if last == Turn::Idle && !self.woken {
                // The engine's thread sleeps.
                continue;
            }
            last = self.turn();
            self.bring_events();
            self.check(last);
            assert!(self.report.turns < turns + MAX_DRAIN_TURNS, "requests do not end");
        }
        self.check_over();
        self.report
    }

    /// Resets the prefix cache now and then; each reset must be done, or refused, after a turn.
    fn reset(&mut self) {
        let Some(handle) = self.handle.clone().filter(|_| self.faults.happens(Fault::Reset, 20)) else { return };
        let mut reset: Reset = Box::pin(async move { handle.reset_prefix_cache().await });
        self.woken = true;
        match reset.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => self.resets.push(reset),
            Poll::Ready(answer) => assert!(matches!(answer, Err(SubmitError::QueueFull { .. })), "{answer:?}"),
        }
        if self.faults.below(Fault::Reset, 4) == 0 {
            self.resets.pop();
        }
    }

    /// Rarely drops the last handle; open requests continue.
    fn drain(&mut self) {
        if self.handle.is_some() && self.faults.happens(Fault::Drain, 2) {
            self.resets.clear();
            self.handle = None;
            self.woken = true;
            self.report.drained += 1;
        }
    }

    /// Deadlines and hang-ups.
    fn clients_act(&mut self) {
        if self.clients.is_empty() {
            return;
        }
        let now = self.clock.now();
        if self.faults.happens(Fault::Deadline, 60) {
            let client = self.faults.below(Fault::Deadline, self.clients.len());
            // Passed, now, soon, or never.
            let deadline = [
                self.start,
                now,
                now + Duration::from_micros(self.faults.below(Fault::Deadline, 2000) as u64),
                now + Duration::from_hours(1000),
            ];
            for _ in 0..=self.faults.below(Fault::Deadline, 2) {
                self.clients[client].cancel_at(deadline[self.faults.below(Fault::Deadline, 4)]);
            }
        }
        if self.faults.happens(Fault::Hangup, 60) {
            let gone = self.faults.below(Fault::Hangup, self.clients.len());
            drop(self.clients.swap_remove(gone));
            self.report.hangups += 1;
        }
    }

    /// Advances the clock, or not.
    fn pass_time(&mut self) {
        if self.faults.happens(Fault::ClockJump, 5) {
            self.clock.advance(Duration::from_hours(1 + self.faults.below(Fault::ClockJump, 5) as u64));
        } else if self.rng.chance(60) {
            self.clock.advance(Duration::from_micros(self.rng.below(40) as u64));
        }
    }

    /// Computes masks and runs a turn of the engine, possibly with a fault.
    fn turn(&mut self) -> Turn {
        let late_mask = self.faults.happens(Fault::LateMask, 800);
        if !late_mask {
            compute_masks(usize::MAX);
        } else if self.rng.chance(10) {
            compute_masks(1);
        }
        let orders = Orders {
            launch_fails: self.faults.happens(Fault::LaunchFails, 5),
            finish_fails: self.faults.happens(Fault::FinishFails, 5),
            lost: self.faults.happens(Fault::DeviceLost, 100),
            slow_step: self.faults.happens(Fault::SlowStep, 10),
            late_mask,
        };
        let comes = self.arriving && !self.works.is_empty() && self.rng.chance(10);
        let work = comes.then(|| self.choose_work());
        let stuck_at = self.busy_since + self.config.step_deadline;
        let request = work.as_ref().map(|work| work.request.clone());
        let watch = self.handle.clone().map(|handle| Watch { handle, stuck_at, request, submitted: None });
        let executor = self.engine.engine().engine.executor();
        (executor.orders, executor.watch) = (orders, watch);
        let (calls, failures, queued) = (executor.calls, executor.failures, self.queued());
        self.woken = false;
        let turn = self.engine.turn();
        let executor = self.engine.engine().engine.executor();
        self.idle = if executor.calls > calls || turn != Turn::Next { 0 } else { self.idle + 1 };
        assert!(self.idle < MAX_IDLE_TURNS, "work without a step: the engine hangs");
        self.busy_since = self.clock.now();
        let submitted = executor.watch.take().and_then(|watch| watch.submitted);
        self.arrived_in_turn = 0;
        if let Some((work, submitted)) = work.zip(submitted) {
            self.arrived_in_turn = usize::from(submitted.is_ok());
            let left = self.queued();
            self.take(work, submitted, left..=queued, failures);
        }
        turn
    }

    /// Delivers events to the streams and lets clients read them.
    fn bring_events(&mut self) {
        if !self.faults.happens(Fault::DemuxLag, 700) {
            self.engine.route_all();
        } else if self.rng.chance(50) {
            self.engine.route();
        }
        self.read(false);
    }

    /// Lets clients read; all of them to the end if the engine is `over`.
    pub(super) fn read(&mut self, over: bool) {
        let now = self.clock.now();
        let tap = self.engine.engine();
        let (rng, faults, report) = (&mut self.rng, &mut self.faults, &mut self.report);
        self.clients.retain_mut(|client| {
            let max_tokens = match client.pace {
                Pace::AtOnce => usize::MAX,
                _ if over => usize::MAX,
                Pace::Slow => usize::from(faults.happens(Fault::SlowClient, 200)),
                // Done: the engine has no reason to know it any more.
                Pace::Stalled if tap.live.contains(&client.stream.id()) || rng.chance(95) => 0,
                Pace::Stalled => usize::MAX,
            };
            let failures = tap.engine.executor().failures;
            let Some(end) = client.read(max_tokens, now, failures) else { return true };
            // Whatever was counted was sent.
            assert_eq!(client.got, tap.emitted[&client.stream.id()]);
            report.closed += u64::from(end == End::Closed);
            false
        });
    }
}
