//! Simulated engines, built from a ledger, that run workloads.

use super::device::SimulatedDevice;
use super::routing::Engines;
use super::setup;
use super::tiers::TierSizes;
use super::world::{self, FrontEnd, Requests, Run};
use anyhow::{Context, Result, anyhow, ensure};
use pegainfer_core::ledger::{Header, HostCost, Law, Ledger, OpShares};
use pegainfer_core::schedule::{SequenceState, StateSlots};

/// The engine of a ledger.
#[derive(Debug, Clone)]
pub struct Simulation {
    /// The engine's properties, after changes by flags.
    pub header: Header,
    /// Number of such engines.
    pub engines: usize,
    /// True if they get requests in turn, instead of from the router.
    pub round_robin: bool,
    /// Factor of all times of steps.
    pub pace: f64,
    /// Copies of KV blocks beyond the device.
    pub tiers: Option<TierSizes>,
    host: HostCost,
    law: Law,
    shares: OpShares,
}

impl Simulation {
    /// The measured engine.
    pub fn new(ledger: &Ledger) -> Result<Self> {
        let (header, host) = (ledger.header.clone(), ledger.host);
        let (law, shares) = (ledger.law()?, OpShares::new(&ledger.ops));
        Ok(Self { header, engines: 1, round_robin: false, pace: 1.0, tiers: None, host, law, shares })
    }

    /// Names of the ops with known times.
    pub fn ops(&self) -> &[String] {
        self.shares.names()
    }

    /// Refuses sizes that no engine can have.
    pub fn check(&self) -> Result<()> {
        let Header { max_num_seqs, max_num_batched_tokens, kv_blocks, .. } = self.header;
        ensure!(
            max_num_seqs <= max_num_batched_tokens,
            "--max-num-seqs {max_num_seqs} is more than --max-num-batched-tokens {max_num_batched_tokens}: each sequence has \
             a token in every step"
        );
        ensure!(kv_blocks > 0, "--kv-cache-tokens is less than a block of {} tokens", self.header.block_size);
        let asked = kv_blocks.saturating_mul(self.header.block_size);
        self.header
            .check()
            .map_err(|why| anyhow!("the engine cannot have these sizes ({asked} tokens of KV cache): {why}"))?;
        Ok(())
    }

    /// Runs `warm_up`, then `requests` on the same engine.
    pub fn run(
        &self,
        warm_up: &Requests<'_>,
        requests: &Requests<'_>,
        front_end: FrontEnd,
        timeline: bool,
    ) -> Result<Run> {
        match self.header.state_config() {
            None => self.run_with(|| (), warm_up, requests, (front_end, timeline)),
            Some(config) => self.run_with(|| StateSlots::new(config), warm_up, requests, (front_end, timeline)),
        }
    }

    fn run_with<S: SequenceState>(
        &self,
        state: impl Fn() -> S,
        warm_up: &Requests<'_>,
        requests: &Requests<'_>,
        (front_end, timeline): (FrontEnd, bool),
    ) -> Result<Run> {
        let depth = self.header.depth;
        let engine = || {
            let device = SimulatedDevice::new(self.law.clone(), self.host, depth, self.shares.clone(), timeline);
            let device = device.at_pace(self.pace);
            let mut engine = setup::engine(device, &self.header, state(), self.tiers);
            engine.forget_step_times();
            engine
        };
        let mut engines = Engines::new((0..self.engines).map(|_| engine()).collect(), self.round_robin);
        world::run(&mut engines, warm_up, front_end, 0).context("the warm-up failed")?;
        world::run(&mut engines, requests, front_end, warm_up.count as u64)
    }
}
