//! Runs a step: the DeepSeek-V4 forward pass on every rank, written once over ops.

use crate::communicator::{Communicator, Local};
use crate::config::{Config, LayerKind};
use crate::engine::LoadError;
use crate::forward::Pass;
use crate::inputs::Inputs;
use crate::numerics::Numerics;
use crate::plan::{Outcome, Step};
use crate::shard::Shard;
use crate::state::{self, LayerState};
use crate::weights::Weights;
use crate::workspace::Workspace;
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_kernels::ops::deepseek_v4::{RopeTable, YarnSpec};
use pegainfer_kernels::ops::{REPORT_WORDS, token_logprobs};
use std::sync::Arc;

/// Largest step an executor is built for.
#[derive(Debug, Clone, Copy)]
pub struct StepBounds {
    /// Input tokens, and samples.
    pub tokens: usize,
    /// Rows.
    pub rows: usize,
    /// Tokens of context.
    pub context: usize,
    /// Slots of recent tokens.
    pub slots: usize,
    /// Pages of compressed entries.
    pub pages: usize,
}

/// Rotations of the two kinds of layers.
#[derive(Debug)]
pub(crate) struct Rotations {
    /// Of window layers.
    pub window: RopeTable,
    /// Of compressed layers, for everything in them.
    pub compressed: RopeTable,
}

impl Rotations {
    /// Those of a layer.
    pub fn of(&self, kind: LayerKind) -> &RopeTable {
        if kind == LayerKind::Window { &self.window } else { &self.compressed }
    }

    fn new(exec: &mut Exec, config: &Config) -> Result<Self, OpError> {
        let yarn = config.yarn;
        let spec = YarnSpec {
            factor: yarn.factor,
            beta_fast: yarn.beta_fast,
            beta_slow: yarn.beta_slow,
            original_context: yarn.original_context,
        };
        Ok(Self {
            window: RopeTable::new(exec, config.rope_dim, config.rope_theta, None)?,
            compressed: RopeTable::new(exec, config.rope_dim, config.compress_rope_theta, Some(spec))?,
        })
    }
}

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
        let inputs = Inputs::new(&mut exec, bounds)?;
        let work = Workspace::new(&mut exec, config, shard, numerics, bounds)?;
        let state = state::allocate(&mut exec, config, numerics, bounds.slots, bounds.pages);
        let state = state.map_err(LoadError::State)?;
        Ok(Self { exec, shard, weights, state, rotations, inputs, work, communicator })
    }

    fn run(&mut self, config: &Config, numerics: Numerics, step: &Step) -> Result<(), OpError> {
        let Self { exec, shard, weights, state, rotations, inputs, work, communicator } = self;
        let result = exec.install(|exec| {
            inputs.fill(exec, step)?;
            work.set_rows(step.tokens.len());
            let communicator = &**communicator;
            let shard = *shard;
            let mut pass = Pass { exec, config, numerics, shard, weights, rotations, inputs, work, step, communicator };
            pass.run(state)
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
    config: Arc<Config>,
    numerics: Numerics,
    ranks: Vec<Rank>,
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
        let ranks = ranks.into_iter().zip(ends).map(rank).collect::<Result<_, _>>()?;
        Ok(Self { config: Arc::new(config), numerics, ranks })
    }

    /// The model's numbers.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Ranks that compute together.
    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Runs a step on all ranks. After an error several ranks cannot go on: they may have stopped at different places.
    pub fn run(&mut self, step: &Step) -> Result<Outcome, OpError> {
        let Self { config, numerics, ranks } = self;
        let (config, numerics) = (&**config, *numerics);
        if let [rank] = &mut ranks[..] {
            rank.run(config, numerics, step)?;
        } else {
            // The first error tells most; the other ranks say that another one has failed.
            let results: Vec<Result<(), OpError>> = std::thread::scope(|scope| {
                let start = |rank| scope.spawn(move || Rank::run(rank, config, numerics, step));
                let threads: Vec<_> = ranks.iter_mut().map(start).collect();
                threads.into_iter().map(join).collect()
            });
            let errors = || results.iter().filter_map(|result| result.as_ref().err());
            if let Some(error) = errors().find(|e| e.op != "communicate").or(errors().next()) {
                return Err(error.clone());
            }
        }
        self.outcome(step)
    }

    /// As [`run`](Self::run), with the record of every op of rank 0.
    pub fn record(&mut self, step: &Step) -> (Result<Outcome, OpError>, Vec<OpRecord>) {
        self.ranks[0].exec.start_recording();
        let outcome = self.run(step);
        (outcome, self.ranks[0].exec.stop_recording())
    }

    /// Logits of the last step's last samples, at most 32, as rules left them: `[samples, vocab]`.
    pub fn logits(&self) -> &Tensor {
        &self.ranks[0].work.logits
    }

    /// Tokens and log-probabilities. Nothing on `Meta` but zeros.
    fn outcome(&self, step: &Step) -> Result<Outcome, OpError> {
        let Rank { exec, work, .. } = &self.ranks[0];
        let mut tokens = vec![0u32; step.samples.len()];
        exec.read(&work.sampled, 0, &mut tokens)?;
        let mut reports = vec![0u32; step.samples.len() * REPORT_WORDS];
        exec.read(&work.logprobs, 0, &mut reports)?;
        let reports = reports.chunks_exact(REPORT_WORDS).zip(&step.samples);
        let logprobs = reports.map(|(report, row)| row.logprobs.map(|top| token_logprobs(report, top))).collect();
        Ok(Outcome { tokens, logprobs })
    }
}

fn join(thread: std::thread::ScopedJoinHandle<'_, Result<(), OpError>>) -> Result<(), OpError> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
