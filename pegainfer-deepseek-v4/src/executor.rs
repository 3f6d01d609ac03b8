//! Runs a step: the DeepSeek-V4 forward pass on every rank, written once over ops.

use crate::bounds::StepBounds;
use crate::communicator::{Communicator, Local};
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
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::{StateSlots, StepExecutor};
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_kernels::runtime::{Readbacks, Sampler};

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
    communicator: Box<dyn Communicator>,
}

impl Rank {
    fn new(
        mut exec: Exec,
        config: &Config,
        numerics: Numerics,
        (shard, weights): (Shard, Weights),
        bounds: StepBounds,
        communicator: Box<dyn Communicator>,
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
        let result = exec.install(|exec| {
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
        });
        let result = result.and_then(|inner| inner);
        if result.is_err() {
            self.communicator.abort();
        }
        result
    }
}

/// The model on all of its ranks.
#[derive(Debug)]
pub struct Executor {
    config: Config,
    numerics: Numerics,
    ranks: Vec<Rank>,
    /// Of rank 0.
    readbacks: Readbacks,
    /// Several ranks cannot go on after an error: they may have stopped at different places.
    lost: bool,
}

impl Executor {
    /// Allocates workspace and state beside loaded weights, one of each for every rank, rank 0 first.
    pub fn new(
        config: Config,
        numerics: Numerics,
        ranks: Vec<(Exec, Shard, Weights)>,
        bounds: StepBounds,
    ) -> Result<Self, LoadError> {
        let ends = Local::new(ranks.len());
        let rank = |((exec, shard, weights), end)| {
            Rank::new(exec, &config, numerics, (shard, weights), bounds, Box::new(end) as Box<dyn Communicator>)
        };
        let mut ranks: Vec<Rank> = ranks.into_iter().zip(ends).map(rank).collect::<Result<_, _>>()?;
        let readbacks = Readbacks::new(&mut ranks[0].exec, bounds.rows)?;
        Ok(Self { config, numerics, ranks, readbacks, lost: false })
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
        self.ranks[0].exec.start_recording();
        let outcome = self.run(step);
        (outcome, self.ranks[0].exec.stop_recording())
    }

    /// Logits of the last step's last samples, at most 32, as logits processors left them: `[samples, vocab]`.
    pub fn logits(&self) -> &Tensor {
        self.ranks[0].sampler.logits()
    }

    /// Computes a step on all ranks.
    fn compute(&mut self, step: &Step) -> Result<(), OpError> {
        let Self { config, numerics, ranks, .. } = self;
        let (config, numerics) = (&*config, *numerics);
        if let [rank] = &mut ranks[..] {
            return rank.run(config, numerics, step);
        }
        // The first error tells most; the other ranks say that another one has failed.
        let results: Vec<Result<(), OpError>> = std::thread::scope(|scope| {
            let start = |rank| scope.spawn(move || Rank::run(rank, config, numerics, step));
            let threads: Vec<_> = ranks.iter_mut().map(start).collect();
            threads.into_iter().map(join).collect()
        });
        let errors = || results.iter().filter_map(|result| result.as_ref().err());
        match errors().find(|e| e.op != "communicate").or(errors().next()) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }
}

impl StepExecutor for Executor {
    type State = StateSlots;

    /// The host computes: a second step would wait for nothing.
    fn useful_depth(&self) -> usize {
        1
    }

    fn launch(&mut self, step: &Step) -> Result<(), OpError> {
        let ranks = self.ranks.len();
        self.compute(step).inspect_err(|_| self.lost = ranks > 1)?;
        let Rank { exec, sampler, .. } = &mut self.ranks[0];
        self.readbacks.start(exec, sampler, &step.samples)
    }

    fn finish(&mut self) -> Result<Outcome, OpError> {
        self.readbacks.finish()
    }

    fn abandon(&mut self) -> Result<(), OpError> {
        self.readbacks.abandon();
        if self.lost {
            return Err(OpError { op: "communicate", message: "the ranks stopped at different places".to_owned() });
        }
        Ok(())
    }
}

fn join(thread: std::thread::ScopedJoinHandle<'_, Result<(), OpError>>) -> Result<(), OpError> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
