//! One rank of an executor.

use crate::bounds::StepBounds;
use crate::config::Config;
use crate::forward::{Head, Pass};
use crate::inputs::Inputs;
use crate::load_error::LoadError;
use crate::numerics::Numerics;
use crate::plan::Step;
use crate::rotations::Rotations;
use crate::shard::Shard;
use crate::state::{self, LayerState};
use crate::weights::Weights;
use crate::workspace::Workspace;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::parallel::Communicator;
use pegainfer_core::schedule::{Graphs, Launches};
use pegainfer_core::tensor::OpError;
use pegainfer_kernels::runtime::Sampler;
use std::sync::Arc;

/// One rank: its part of the model, and its device.
#[derive(Debug)]
pub(super) struct Rank {
    pub exec: Exec,
    pub shard: Shard,
    weights: Weights,
    /// State of each layer, and behind them that of the layer that drafts, if it is loaded.
    pub state: Vec<LayerState>,
    rotations: Rotations,
    inputs: Inputs,
    work: Workspace,
    pub sampler: Sampler,
    /// CUDA graphs of decode steps.
    pub graphs: Graphs,
    communicator: Arc<dyn Communicator>,
    /// Number of layers that a step runs through: all of them, except in a warm-up.
    pub layers: usize,
}

/// The layers that a pass runs through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// All layers of the model.
    Layers,
    /// The layer that drafts.
    Draft {
        /// It runs behind its own drafts; otherwise over the tokens of a step.
        again: bool,
    },
}

impl Rank {
    /// Allocates workspace and state beside loaded weights.
    pub fn new(
        mut exec: Exec,
        config: &Config,
        numerics: Numerics,
        (shard, weights): (Shard, Weights),
        bounds: StepBounds,
        communicator: Arc<dyn Communicator>,
    ) -> Result<Self, LoadError> {
        let rotations = Rotations::new(&mut exec, config)?;
        let inputs = Inputs::new(&mut exec, config.vocab_size, bounds)?;
        let sampler = Sampler::new(&mut exec, config.vocab_size, bounds.samples)?;
        let work = Workspace::new(&mut exec, config, shard, numerics, bounds, sampler.max_rows())?;
        let state = state::allocate(&mut exec, config, numerics, bounds);
        let state = state.map_err(LoadError::State)?;
        let graph_rows = bounds.rows.min(sampler.max_rows());
        let graphs = Graphs::new(if bounds.graphs && exec.device() == Device::Cuda { graph_rows } else { 0 });
        let layers = weights.layers.len();
        Ok(Self { exec, shard, weights, state, rotations, inputs, work, sampler, graphs, communicator, layers })
    }

    /// Uploads `step`, and moves the state of rows that change their slot.
    pub fn begin(&mut self, step: &Step) -> Result<(), OpError> {
        let Self { exec, state, inputs, work, .. } = self;
        exec.install(|exec| {
            inputs.fill(exec, step)?;
            work.set_rows(step.tokens.len());
            state::copy_slots(exec, state, step)
        })?
    }

    /// Launches a pass of the layer that drafts, `again` if it runs behind its own drafts.
    pub fn draft(&mut self, config: &Config, numerics: Numerics, pass: &Step, again: bool) -> Result<(), OpError> {
        let Self { exec, inputs, work, .. } = self;
        exec.install(|exec| inputs.fill(exec, pass))??;
        work.set_rows(pass.tokens.len());
        self.on_device((config, numerics, Part::Draft { again }), pass, |_, launches| launches.launch())
    }

    /// Makes the graph of steps of `size`, if it is time.
    pub fn capture(
        &mut self,
        config: &Config,
        numerics: Numerics,
        step: &Step,
        size: Option<usize>,
    ) -> Result<(), OpError> {
        self.on_device((config, numerics, Part::Layers), step, |graphs, launches| graphs.capture(size, launches))
    }

    /// Launches a step, for which the rank has begun.
    pub fn run(
        &mut self,
        config: &Config,
        numerics: Numerics,
        step: &Step,
        size: Option<usize>,
    ) -> Result<(), OpError> {
        self.on_device((config, numerics, Part::Layers), step, |graphs, launches| graphs.run(size, launches))
    }

    fn on_device(
        &mut self,
        (config, numerics, part): (&Config, Numerics, Part),
        step: &Step,
        job: impl FnOnce(&mut Graphs, &mut StepLaunches<'_>) -> Result<(), OpError> + Send,
    ) -> Result<(), OpError> {
        let Self { exec, shard, weights, state, rotations, inputs, work, sampler, graphs, communicator, layers } = self;
        let (shard, communicator) = (*shard, &**communicator);
        let state = match part {
            Part::Layers => &mut state[..*layers],
            Part::Draft { .. } => &mut state[config.layers.len()..],
        };
        exec.install(|exec| {
            let mut launches = StepLaunches {
                exec,
                config,
                numerics,
                shard,
                weights,
                state,
                rotations,
                inputs,
                work,
                sampler,
                communicator,
                step,
                part,
            };
            job(graphs, &mut launches)
        })?
    }
}

/// The launches of one step between its inputs and its tokens: what a CUDA graph holds.
struct StepLaunches<'a> {
    exec: &'a mut Exec,
    config: &'a Config,
    numerics: Numerics,
    shard: Shard,
    weights: &'a Weights,
    /// State of the layers that the pass runs through.
    state: &'a mut [LayerState],
    rotations: &'a Rotations,
    inputs: &'a mut Inputs,
    work: &'a mut Workspace,
    sampler: &'a mut Sampler,
    communicator: &'a dyn Communicator,
    step: &'a Step,
    part: Part,
}

impl Launches for StepLaunches<'_> {
    fn exec(&mut self) -> &mut Exec {
        self.exec
    }

    fn launch(&mut self) -> Result<(), OpError> {
        let Self { config, numerics, shard, weights, rotations, communicator, step, part, .. } = *self;
        let Self { exec, state, inputs, work, sampler, .. } = self;
        // A step may ask for any token of the one before, and a graph keeps the length.
        sampler.sampled.set_rows(sampler.sampled.max_rows());
        let previous = &sampler.sampled;
        let mut pass =
            Pass { exec, config, numerics, shard, weights, rotations, inputs, work, step, previous, communicator };
        match part {
            Part::Layers => pass.run(state)?,
            Part::Draft { again } => pass.draft(state, again)?,
        }
        let communicator = (shard.ranks > 1).then_some(communicator);
        let (normed, part) = (&mut work.last_normed, &mut work.logits_part);
        let mut head = Head { normed, matrix: &weights.head, part, communicator };
        sampler.run_with(exec, &mut head, &mut inputs.common, &step.samples)
    }
}
