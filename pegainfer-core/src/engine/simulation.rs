//! An engine without threads, for simulations and tests.
//!
//! [`EngineHandle::spawn`] runs the engine loop on one thread and the demultiplexer on another. [`SimulatedEngine`]
//! runs both, turn by turn, on the caller's thread; the caller decides what happens between turns. With a simulated
//! [`clock`](StepEngine::clock) the run depends only on the caller: nothing waits or reads the wall clock.

use super::demux::Demultiplexer;
use super::engine_loop::EngineLoop;
use super::{EngineCell, EngineConfig, EngineHandle, StepEngine};

pub use super::engine_loop::Turn;

/// Number of engine turns that the demultiplexer may lag.
const MAX_LAG: usize = 16;
/// Maximum number of event batches in a turn: one each for a plan, a step, a failure.
const BATCHES: usize = 4;

/// The loop of an engine and its demultiplexer, run by the caller.
pub struct SimulatedEngine<E: StepEngine> {
    engine_loop: EngineLoop<E>,
    demux: Demultiplexer,
    /// Turns since the demultiplexer last caught up.
    lag: usize,
}

impl<E: StepEngine> SimulatedEngine<E> {
    /// The loop of `engine` and a handle. The handle works like one of [`EngineHandle::spawn`], except that its drop
    /// waits for nothing.
    pub fn new(engine: E, config: EngineConfig) -> (EngineHandle, Self) {
        // Each request may be opened and closed once in a turn.
        let capacity = MAX_LAG * (2 * config.max_queued + BATCHES);
        let (cell, engine_loop, demux, _running) = EngineCell::connect(engine, config, capacity);
        (EngineHandle::of(cell), Self { engine_loop, demux, lag: 0 })
    }

    /// Runs one turn of the engine loop.
    pub fn turn(&mut self) -> Turn {
        self.lag += 1;
        if self.lag == MAX_LAG {
            self.route_all();
        }
        self.engine_loop.turn()
    }

    /// Delivers the engine's next message to its streams; false if there is none.
    pub fn route(&mut self) -> bool {
        self.demux.turn()
    }

    /// Delivers all queued messages to their streams.
    pub fn route_all(&mut self) {
        while self.route() {}
        self.lag = 0;
    }

    /// The engine, for inspection between turns.
    pub fn engine(&mut self) -> &mut E {
        &mut self.engine_loop.engine
    }
}

/// A handle like that of [`EngineHandle::spawn`], and the closures of the engine thread and the demultiplexer thread,
/// for a caller that starts the threads itself.
pub fn threads<E: StepEngine>(
    engine: E,
    config: EngineConfig,
) -> (EngineHandle, impl FnOnce() + Send + 'static, impl FnOnce() + Send + 'static) {
    let (cell, run_engine, run_demux) = EngineCell::threads(engine, config);
    (EngineHandle::of(cell), run_engine, run_demux)
}
