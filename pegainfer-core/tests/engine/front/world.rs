//! Several engines of one handle, run turn by turn on simulated clocks.

use pegainfer_core::engine::simulation::{SimulatedEngine, Turn};
use pegainfer_core::engine::{
    Clock, EngineConfig, EngineHandle, EngineLimits, GenerateRequest, SimulatedClock, TokenEvent, TokenStream,
};
use pegainfer_core::schedule::{EngineCore, Outcome, Step, StepExecutor, TokenBudget};
use pegainfer_core::tensor::OpError;
use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

pub const BLOCK: usize = 16;
pub const STEP_DEADLINE: Duration = Duration::from_secs(1);

/// A device that samples token 1, and takes a millisecond per step and a microsecond per token.
pub struct Device {
    clock: SimulatedClock,
    in_flight: VecDeque<(Duration, usize)>,
    lost: Arc<AtomicBool>,
}

impl StepExecutor for Device {
    type State = ();

    fn useful_depth(&self) -> usize {
        1
    }

    fn launch(&mut self, step: &Step) -> Result<(), OpError> {
        if self.lost.load(Ordering::Relaxed) {
            return Err(OpError { op: "linear", message: "the device is gone".into() });
        }
        let time = Duration::from_micros(1000 + step.tokens.len() as u64);
        self.in_flight.push_back((time, step.samples.len()));
        Ok(())
    }

    fn sample(&mut self, _: &Step) -> Result<(), OpError> {
        Ok(())
    }

    fn finish(&mut self) -> Result<Outcome, OpError> {
        let (time, samples) = self.in_flight.pop_front().unwrap();
        self.clock.advance(time);
        Ok(Outcome { tokens: vec![1; samples], ..Outcome::default() })
    }

    fn abandon(&mut self) -> Result<(), OpError> {
        match self.lost.load(Ordering::Relaxed) {
            true => Err(OpError { op: "abandon", message: "the device is gone".into() }),
            false => Ok(()),
        }
    }

    fn clock(&self) -> Clock {
        Clock::Simulated(self.clock.clone())
    }

    fn rest(&mut self, time: Duration) {
        self.clock.advance(time);
    }
}

/// Engines and their handle.
pub struct World {
    pub handle: EngineHandle,
    /// `None` for an engine whose thread has unwound.
    engines: Vec<Option<SimulatedEngine<EngineCore<Device>>>>,
    pub clocks: Vec<SimulatedClock>,
    lost: Vec<Arc<AtomicBool>>,
    over: Vec<bool>,
}

/// Sizes of an engine.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub kv_blocks: usize,
    pub max_num_seqs: usize,
    pub step_tokens: usize,
    pub max_queued: usize,
}

impl Default for Sizes {
    fn default() -> Self {
        Self { kv_blocks: 1000, max_num_seqs: 8, step_tokens: 512, max_queued: 1000 }
    }
}

impl World {
    pub fn new(engines: usize) -> Self {
        Self::with_sizes(&vec![Sizes::default(); engines])
    }

    pub fn with_sizes(sizes: &[Sizes]) -> Self {
        let start = Instant::now();
        let (mut handles, mut engines, mut clocks, mut lost) = (vec![], vec![], vec![], vec![]);
        for sizes in sizes {
            let clock = SimulatedClock::new(start);
            let is_lost = Arc::new(AtomicBool::new(false));
            let device = Device { clock: clock.clone(), in_flight: VecDeque::new(), lost: is_lost.clone() };
            let tokens = TokenBudget { step: sizes.step_tokens, mixed: sizes.step_tokens };
            let core = EngineCore::new(device, limits(sizes), tokens, (), None);
            let config =
                EngineConfig { max_queued: sizes.max_queued, step_deadline: STEP_DEADLINE, ..EngineConfig::default() };
            let (handle, engine) = SimulatedEngine::new(core, config);
            handles.push(handle);
            engines.push(Some(engine));
            clocks.push(clock);
            lost.push(is_lost);
        }
        let over = vec![false; sizes.len()];
        Self { handle: EngineHandle::join(handles), engines, clocks, lost, over }
    }

    pub fn submit(&self, request: GenerateRequest) -> TokenStream {
        self.handle.submit(request).unwrap()
    }

    /// The next step of this engine fails for good.
    pub fn lose(&self, engine: usize) {
        self.lost[engine].store(true, Ordering::Relaxed);
    }

    /// Drops an engine as a panic of its thread does.
    pub fn unwind(&mut self, engine: usize) {
        (self.engines[engine], self.over[engine]) = (None, true);
    }

    /// Runs `turns` turns of one engine.
    pub fn turns(&mut self, engine: usize, turns: usize) {
        let Some(running) = &mut self.engines[engine] else { return };
        for _ in 0..turns {
            if !self.over[engine] {
                self.over[engine] = running.turn() == Turn::Over;
            }
        }
        running.route_all();
    }

    /// Time of the engine that is behind the others.
    pub fn now(&self) -> Duration {
        self.clocks.iter().map(SimulatedClock::elapsed).min().unwrap()
    }

    /// Runs a turn of each engine that is not ahead of the others.
    pub fn turn(&mut self) {
        let now = self.now();
        for engine in 0..self.engines.len() {
            if self.clocks[engine].elapsed() <= now {
                self.turns(engine, 1);
                self.pass(engine);
            }
        }
    }

    /// Lets time pass for an idle engine.
    fn pass(&self, engine: usize) {
        let stats = self.handle.engines()[engine].stats();
        if stats.running + stats.waiting == 0 || self.over[engine] {
            self.clocks[engine].advance(Duration::from_millis(1));
        }
    }

    /// Runs all engines until their requests have ended.
    pub fn finish(&mut self) {
        for _ in 0..100_000 {
            let stats = self.handle.stats();
            if stats.running + stats.waiting == 0 {
                return;
            }
            self.turn();
        }
        panic!("requests do not end");
    }
}

fn limits(sizes: &Sizes) -> EngineLimits {
    EngineLimits {
        max_model_len: 40_000,
        vocab_size: 1 << 20,
        block_size: BLOCK,
        kv_blocks: sizes.kv_blocks,
        kv_cache_dtype: "bf16",
        max_num_seqs: sizes.max_num_seqs,
        eos_token_ids: vec![9],
        num_speculative_tokens: None,
        image_token: None,
        unsupported: &[],
        max_loras: 0,
        hidden_size: 0,
    }
}

/// Tokens of text number `text`.
pub fn text(text: u32, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| 10 + text * 1000 + i % 1000).collect()
}

pub fn request(prompt: &[u32], max_tokens: usize) -> GenerateRequest {
    GenerateRequest { ignore_eos: true, ..GenerateRequest::greedy(prompt, max_tokens) }
}

/// Events that are ready now, as letters: `a`dmitted, `t`oken, `f`inished, e`x`ited with an error, `e`nd.
pub fn ready(stream: &mut TokenStream) -> String {
    let mut letters = String::new();
    loop {
        let event = match pin!(stream.recv()).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => return letters,
            Poll::Ready(event) => event,
        };
        letters.push(match event {
            Some(TokenEvent::Admitted { .. }) => 'a',
            Some(TokenEvent::Token(_)) => 't',
            Some(TokenEvent::Finished { .. }) => 'f',
            Some(_) => 'x',
            None => return letters + "e",
        });
    }
}
