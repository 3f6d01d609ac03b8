//! Runs a step: the DeepSeek-V4 forward pass on every rank, written once over ops.

use crate::bounds::StepBounds;
use crate::config::Config;
use crate::forward::{Head, Pass};
use crate::inputs::Inputs;
use crate::load_error::LoadError;
use crate::numerics::Numerics;
use crate::plan::{Outcome, Step};
use crate::rotations::Rotations;
use crate::shard::Shard;
use crate::state::{self, LayerState};
use crate::weights::Weights;
use crate::workspace::Workspace;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::{Communicator, Ranks};
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::{StateSlots, StepExecutor};
use pegainfer_core::tensor::OpError;
use pegainfer_kernels::parallel;
use pegainfer_kernels::runtime::{Readbacks, Sampler};
use std::sync::Arc;

/// One rank: its part of the model, and its device.
#[derive(Debug)]
struct Rank {
    exec: Exec,
    shard: Shard,
    weights: Weights,
    state: Vec<LayerState>,
    rotations: Rotations,
    inputs: Inputs,
    work: Workspace,
    sampler: Sampler,
    communicator: Arc<dyn Communicator>,
}

impl Rank {
    fn new(
        mut exec: Exec,
        config: &Config,
        numerics: Numerics,
        (shard, weights): (Shard, Weights),
        bounds: StepBounds,
        communicator: Arc<dyn Communicator>,
    ) -> Result<Self, LoadError> {
        let rotations = Rotations::new(&mut exec, config)?;
        let inputs = Inputs::new(&mut exec, config.vocab_size, bounds)?;
        let sampler = Sampler::new(&mut exec, config.vocab_size, bounds.rows)?;
        let work = Workspace::new(&mut exec, config, shard, numerics, bounds, sampler.max_rows())?;
        let state = state::allocate(&mut exec, config, numerics, bounds.slots, bounds.pages);
        let state = state.map_err(LoadError::State)?;
        Ok(Self { exec, shard, weights, state, rotations, inputs, work, sampler, communicator })
    }

    fn run(&mut self, config: &Config, numerics: Numerics, step: &Step) -> Result<(), OpError> {
        let Self { exec, shard, weights, state, rotations, inputs, work, sampler, communicator } = self;
        exec.install(|exec| {
            inputs.fill(exec, step, &sampler.sampled)?;
            work.set_rows(step.tokens.len());
            let communicator = &**communicator;
            let shard = *shard;
            let mut pass = Pass { exec, config, numerics, shard, weights, rotations, inputs, work, step, communicator };
            pass.run(state)?;
            let communicator = (shard.ranks > 1).then_some(communicator);
            let (normed, part) = (&mut work.last_normed, &mut work.logits_part);
            let mut head = Head { normed, matrix: &weights.head, part, communicator };
            sampler.run_with(exec, &mut head, &mut inputs.common, &step.samples)
        })?
    }
}

/// The model on all of its ranks.
#[derive(Debug)]
pub struct Executor {
    config: Arc<Config>,
    numerics: Numerics,
    ranks: Ranks<Rank>,
    /// Of rank 0.
    readbacks: Readbacks,
}

impl Executor {
    /// Connects the ranks, and allocates workspace and state beside loaded weights, one of each for every rank, rank 0 first.
    /// A rank of several that comes alone gets a communicator that loops back.
    pub fn new(
        config: Config,
        numerics: Numerics,
        mut ranks: Vec<(Exec, Shard, Weights)>,
        bounds: StepBounds,
    ) -> Result<Self, LoadError> {
        let ends = match &mut ranks[..] {
            [(exec, shard, _)] if shard.ranks > 1 => vec![parallel::loop_back(exec, shard.rank, shard.ranks)?],
            all => parallel::connect(&mut all.iter_mut().map(|(exec, ..)| exec).collect::<Vec<_>>())?,
        };
        let rank = |((exec, shard, weights), end): (_, Arc<dyn Communicator>)| -> Result<_, LoadError> {
            Ok((Rank::new(exec, &config, numerics, (shard, weights), bounds, end.clone())?, end))
        };
        let ranks = ranks.into_iter().zip(ends).map(rank).collect::<Result<_, _>>()?;
        let started = Ranks::new(ranks);
        let mut ranks = started.map_err(|e| LoadError::Option(format!("the ranks cannot be started: {e}")))?;
        let readbacks = Readbacks::new(&mut ranks.first_mut().exec, bounds.rows)?;
        Ok(Self { config: Arc::new(config), numerics, ranks, readbacks })
    }

    /// The model's numbers.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Launches a step on all ranks and waits for it.
    pub fn run(&mut self, step: &Step) -> Result<Outcome, OpError> {
        self.launch(step)?;
        self.finish()
    }

    /// As [`run`](Self::run), with the record of every op of rank 0.
    pub fn record(&mut self, step: &Step) -> (Result<Outcome, OpError>, Vec<OpRecord>) {
        self.ranks.first_mut().exec.start_recording();
        let outcome = self.run(step);
        (outcome, self.ranks.first_mut().exec.stop_recording())
    }

    /// Logits of the last step's last samples, at most 32, as logits processors left them: `[samples, vocab]`.
    pub fn logits(&self) -> Result<Vec<f32>, OpError> {
        let Rank { exec, sampler, .. } = self.ranks.first();
        let mut values = vec![0.0; sampler.logits().elements()];
        exec.read(sampler.logits(), 0, &mut values)?;
        Ok(values)
    }
}

impl StepExecutor for Executor {
    type State = StateSlots;

    /// The host computes: a second step would wait for nothing.
    fn useful_depth(&self) -> usize {
        1
    }

    fn launch(&mut self, step: &Step) -> Result<(), OpError> {
        let (config, numerics, shared) = (self.config.clone(), self.numerics, step.clone());
        self.ranks.run(move |rank| rank.run(&config, numerics, &shared))?;
        let Rank { exec, sampler, .. } = self.ranks.first_mut();
        self.readbacks.start(exec, sampler, &step.samples)
    }

    fn finish(&mut self) -> Result<Outcome, OpError> {
        let outcome = self.readbacks.finish();
        // A rank that has failed on its device has left the others without its part.
        self.ranks.check()?;
        outcome
    }

    fn abandon(&mut self) -> Result<(), OpError> {
        self.readbacks.abandon();
        self.ranks.run(|rank| rank.exec.synchronize())
    }
}
