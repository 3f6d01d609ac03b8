//! The interface between the scheduler and a device with a model.

use super::state::SequenceState;
use super::step::{Outcome, Step};
use crate::engine::Clock;
use crate::grammar::MaskSignal;
use crate::kv::tiers::{Transfer, TransferDone};
use crate::tensor::OpError;
use std::time::{Duration, Instant};

/// Maximum number of steps that are launched and not finished.
pub const STEPS_IN_FLIGHT: usize = 2;

/// Runs the steps of a scheduler, each in two phases, forward pass and sampling. On a GPU both only enqueue, and the
/// next step may be launched before the host has seen the tokens of this one.
pub trait StepExecutor: Send + 'static {
    /// State of a sequence other than the KV cache.
    type State: SequenceState;

    /// Number of steps in flight that improves throughput, at most [`STEPS_IN_FLIGHT`].
    fn useful_depth(&self) -> usize;

    /// Starts the forward pass of a step, up to the logits of its samples; at most [`STEPS_IN_FLIGHT`] steps may be in
    /// flight. The CPU computes at once. The logits updates of deferred samples are not known yet.
    fn launch(&mut self, step: &Step<<Self::State as SequenceState>::Row>) -> Result<(), OpError>;

    /// Starts sampling for the step launched last: logits processors, masks, draws and log-probabilities.
    /// Called once after each [`launch`](Self::launch), before the next one.
    fn sample(&mut self, step: &Step<<Self::State as SequenceState>::Row>) -> Result<(), OpError>;

    /// Waits for the oldest step in flight. On `Meta` the outcome has no tokens.
    fn finish(&mut self) -> Result<Outcome, OpError>;

    /// Drops every step in flight once the device is done with them; an error means that the device is lost.
    fn abandon(&mut self) -> Result<(), OpError>;

    /// The clock that the engine and its handles read; the wall clock unless the device is simulated.
    fn clock(&self) -> Clock {
        Clock::Wall
    }

    /// Current time of that clock.
    fn now(&self) -> Instant {
        self.clock().now()
    }

    /// Advances that clock by `time` while nothing is in flight.
    fn rest(&mut self, time: Duration) {
        std::thread::sleep(time);
    }

    /// Waits until more than `seen` masks are ready, for at most `limit` on the executor's clock. Called while no
    /// sampled step is in flight.
    fn wait_for_masks(&mut self, masks: &MaskSignal, seen: u64, limit: Duration) {
        masks.wait(seen, limit);
    }

    /// Starts to copy blocks; returns before it is done. Called only for engines with [`tiers`](crate::kv::tiers).
    fn start_transfer(&mut self, transfer: Transfer) {
        drop(transfer);
    }

    /// The transfers that have ended since the last call, in any order. May carry out a part of a transfer, for as long
    /// as a short step takes.
    fn finished_transfers(&mut self) -> Vec<TransferDone> {
        Vec::new()
    }

    /// Waits up to `limit` for the end of a transfer. Called while nothing else is to be done.
    fn wait_for_transfers(&mut self, limit: Duration) {
        self.rest(limit);
    }

    /// Turns timing of the next step's ops on or off; ignored by devices without it.
    fn time_ops(&mut self, on: bool) {
        let _ = on;
    }

    /// Op times of the last finished step, if requested.
    fn take_op_times(&mut self) -> Vec<(&'static str, Duration)> {
        Vec::new()
    }
}
