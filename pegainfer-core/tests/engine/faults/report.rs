//! Counts of events in a world.

use pegainfer_core::engine::EngineStats;
use std::fmt;
use std::time::Duration;

/// Counts of one world, or of many.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// Counters of the engine.
    pub stats: EngineStats,
    /// Turns of the engine's loop.
    pub turns: usize,
    /// Requests that the engine took.
    pub requests: u64,
    /// Requests that found the queue full.
    pub refused: u64,
    /// Streams that were dropped before their end.
    pub hangups: u64,
    /// Streams that were closed by their deadline.
    pub closed: u64,
    /// Launches and steps that failed.
    pub failed_steps: u64,
    /// Requests that failed with their device.
    pub aborted: u64,
    /// Requests that ended alone after failed steps.
    pub failed: u64,
    /// Requests whose grammars failed.
    pub broken: u64,
    /// Steps past their deadline, as seen from outside.
    pub stuck: u64,
    /// Worlds that ended with a lost device.
    pub lost: u64,
    /// Worlds whose last handle was dropped early.
    pub drained: u64,
    /// Virtual time.
    pub simulated: Duration,
}

impl Report {
    /// Adds the counts of another world.
    pub fn add(&mut self, other: &Self) {
        self.stats.steps += other.stats.steps;
        self.stats.preemptions += other.stats.preemptions;
        self.stats.prefix_hits += other.stats.prefix_hits;
        self.stats.prompt_tokens += other.stats.prompt_tokens;
        self.stats.generation_tokens += other.stats.generation_tokens;
        self.turns += other.turns;
        self.requests += other.requests;
        self.refused += other.refused;
        self.hangups += other.hangups;
        self.closed += other.closed;
        self.failed_steps += other.failed_steps;
        self.aborted += other.aborted;
        self.failed += other.failed;
        self.broken += other.broken;
        self.stuck += other.stuck;
        self.lost += other.lost;
        self.drained += other.drained;
        self.simulated += other.simulated;
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stats, turns, requests, refused, hangups, closed, .. } = self;
        let Self { failed_steps, failed, aborted, broken, stuck, lost, drained, simulated, .. } = self;
        write!(
            f,
            "{} steps in {turns} turns and {:.0} simulated hours; {requests} requests, {refused} refused, {hangups} hung up, \
             {closed} closed by deadline, {broken} with a broken grammar; {failed_steps} failed steps that ended \
             {failed} requests, {lost} lost devices with {aborted} requests, {stuck} stuck steps, \
             {drained} drains; {} preemptions, {} of {} prompt \
             tokens cached, {} tokens",
            stats.steps,
            simulated.as_secs_f64() / 3600.0,
            stats.preemptions,
            stats.prefix_hits,
            stats.prompt_tokens,
            stats.generation_tokens,
        )
    }
}
