//! An engine without threads, for simulations and tests.
//!
//! [`EngineHandle::spawn`] runs the loop of the engine on one thread and the demultiplexer on another. [`SimulatedEngine`] is both,
//! turn by turn, on the thread of its caller, who thereby decides what happens between two turns. With an engine whose
//! [`clock`](StepEngine::clock) is simulated the run is a function of what the caller does: nothing waits, and nothing reads the
//! wall clock.

use super::demux::Demultiplexer;
use super::engine_loop::EngineLoop;
use super::{EngineConfig, EngineHandle, StepEngine};

pub use super::engine_loop::Turn;

/// Turns of the engine in which the demultiplexer may fall behind.
const MAX_LAG: usize = 16;
/// Messages of a turn to the demultiplexer besides those that open and close streams: events of a plan, of a step, of a failure.
const BATCHES: usize = 4;

/// The loop of an engine and its demultiplexer, run by the caller.
pub struct SimulatedEngine<E: StepEngine> {
    engine_loop: EngineLoop<E>,
    demux: Demultiplexer,
    /// Turns since the demultiplexer had routed everything.
    lag: usize,
}

impl<E: StepEngine> SimulatedEngine<E> {
    /// The loop of `engine`, and a handle that works as the one that [`EngineHandle::spawn`] returns, but for its end: it
    /// waits for nothing.
    pub fn new(engine: E, config: EngineConfig) -> (EngineHandle, Self) {
        // In a turn each request may be opened, and each may be closed.
        let capacity = MAX_LAG * (2 * config.max_queued + BATCHES);
        let (handle, engine_loop, demux, _running) = EngineHandle::connect(engine, config, capacity);
        (handle, Self { engine_loop, demux, lag: 0 })
    }

    /// One turn of the engine's loop.
    pub fn turn(&mut self) -> Turn {
        self.lag += 1;
        if self.lag == MAX_LAG {
            self.route_all();
        }
        self.engine_loop.turn()
    }

    /// Brings the next message of the engine to its streams; false if there is none.
    pub fn route(&mut self) -> bool {
        self.demux.turn()
    }

    /// Brings everything to its stream.
    pub fn route_all(&mut self) {
        while self.route() {}
        self.lag = 0;
    }

    /// The engine, to look into it between turns.
    pub fn engine(&mut self) -> &mut E {
        &mut self.engine_loop.engine
    }
}

/// A handle that works as the one that [`EngineHandle::spawn`] returns, what its engine thread runs, and what its demultiplexer's
/// thread runs, for a caller who starts these threads.
pub fn threads<E: StepEngine>(
    engine: E,
    config: EngineConfig,
) -> (EngineHandle, impl FnOnce() + Send + 'static, impl FnOnce() + Send + 'static) {
    EngineHandle::threads(engine, config)
}
