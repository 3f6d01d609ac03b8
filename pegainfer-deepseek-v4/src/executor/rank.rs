//! One rank of an executor.

use crate::bounds::{Sharing, StepBounds};
use crate::config::Config;
use crate::forward::{Head, MarkovHead, Pass};
use crate::graph_shape::{GraphBounds, GraphShape};
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
use pegainfer_kernels::ops::deepseek_v4::RingTable;
use pegainfer_runtime::Sampler;
use std::sync::Arc;

/// One rank: its part of the model, and its device.
#[derive(Debug)]
pub(super) struct Rank {
    pub exec: Exec,
    pub shard: Shard,
    weights: Weights,
    /// State of each layer, followed by that of the layers that draft, if they are loaded.
    pub state: Vec<LayerState>,
    /// Addresses of all state in slots.
    rings: RingTable,
    rotations: Rotations,
    inputs: Inputs,
    work: Workspace,
    pub sampler: Sampler,
    /// CUDA graphs of steps, and of passes of the layers that draft.
    pub graphs: Graphs<GraphKey>,
    graph_bounds: GraphBounds,
    communicator: Arc<dyn Communicator>,
    /// Work shared between ranks; see [`StepBounds::sharing`].
    sharing: Sharing,
    /// Number of layers that a step runs: all of them, except in a warm-up.
    pub layers: usize,
}

/// Key of a CUDA graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct GraphKey {
    pub part: PassKind,
    pub shape: GraphShape,
}

/// The layers that a pass runs through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum PassKind {
    /// All layers of the model.
    Layers,
    /// The layer for multi-token prediction.
    Draft {
        /// If true, input is the layer's own drafts, otherwise the tokens of a step.
        again: bool,
    },
    /// DSpark's stages, over the blocks after a step.
    Blocks,
}

impl Rank {
    /// Allocates workspace and state for loaded weights.
    pub fn new(
        mut exec: Exec,
        config: &Config,
        numerics: Numerics,
        (shard, mut weights): (Shard, Weights),
        bounds: StepBounds,
        communicator: Arc<dyn Communicator>,
    ) -> Result<Self, LoadError> {
        weights.widen(&mut exec, numerics.activations)?;
        let rotations = Rotations::new(&mut exec, config)?;
        let inputs = Inputs::new(&mut exec, config.vocab_size, bounds)?;
        let sampler = Sampler::new(&mut exec, config.vocab_size, bounds.samples)?;
        let work = Workspace::new(&mut exec, config, shard, numerics, bounds, sampler.max_rows())?;
        let state = state::allocate(&mut exec, config, numerics, bounds);
        let mut state = state.map_err(LoadError::State)?;
        let rings = state::ring_table(&mut exec, &mut state)?;
        let rows = bounds.rows.min(sampler.max_rows());
        let graphs = Graphs::new(if bounds.graphs && exec.device() == Device::Cuda { rows } else { 0 });
        let stages = config.loaded_dspark();
        let blocks = stages.map_or((0, 0), |dspark| (bounds.blocks(dspark, sampler.max_rows()), dspark.block.tokens));
        let samples = bounds.samples.min(sampler.max_rows());
        let graph_bounds = GraphBounds::new(StepBounds { samples, ..bounds }, blocks);
        let layers = weights.layers.len();
        Ok(Self {
            exec,
            shard,
            weights,
            state,
            rings,
            rotations,
            inputs,
            work,
            sampler,
            graphs,
            graph_bounds,
            communicator,
            sharing: bounds.sharing,
            layers,
        })
    }

    /// Pads steps as for CUDA graphs, but runs them launch by launch.
    pub fn only_pad(&mut self, rows: usize) {
        self.graphs = Graphs::padding_only(rows.min(self.sampler.max_rows()));
    }

    /// The shape that a pass through `part` over `step` has as a CUDA graph; `None` if it runs launch by launch.
    pub fn graph_shape(&self, part: PassKind, step: &Step) -> Option<GraphShape> {
        let shape = match part {
            PassKind::Blocks => self.graph_bounds.block_shape(&self.graphs, step),
            PassKind::Layers | PassKind::Draft { .. } => self.graph_bounds.shape(&self.graphs, step),
        };
        // A record is of the ops themselves.
        shape.filter(|_| !self.exec.is_recording())
    }

    /// Uploads `step` for a pass of kind `part`, and first moves the state of rows that change their slot.
    pub fn begin(&mut self, part: PassKind, step: &Step) -> Result<(), OpError> {
        let Self { exec, state, rings, inputs, work, .. } = self;
        exec.install(|exec| {
            inputs.fill(exec, step)?;
            work.set_rows(step.tokens.len());
            match part {
                PassKind::Layers => state::copy_slots(exec, state, rings, step),
                // It moved before the layers ran.
                PassKind::Draft { .. } => Ok(()),
                PassKind::Blocks => {
                    let ring = state.last().map_or(0, |layer| layer.window.shape()[1]);
                    work.dspark.as_mut().map_or(Ok(()), |dspark| dspark.fill(exec, step, ring))
                }
            }
        })?
    }

    /// Runs `job`, such as [`Graphs::run`], with the launches of a pass over `step`, which [`begin`](Self::begin) has
    /// uploaded.
    pub fn on_device(
        &mut self,
        (config, numerics, part): (&Config, Numerics, PassKind),
        step: &Step,
        job: impl FnOnce(&mut Graphs<GraphKey>, &mut StepLaunches<'_>) -> Result<(), OpError> + Send,
    ) -> Result<(), OpError> {
        let Self {
            exec, shard, weights, state, rotations, inputs, work, sampler, graphs, communicator, layers, ..
        } = self;
        let (shard, communicator, sharing) = (*shard, &**communicator, self.sharing);
        let (state, draft_state) = state.split_at_mut(config.layers.len());
        let state = &mut state[..*layers];
        exec.install(|exec| {
            let mut launches = StepLaunches {
                exec,
                config,
                numerics,
                shard,
                weights,
                state,
                draft_state,
                rotations,
                inputs,
                work,
                sampler,
                communicator,
                sharing,
                step,
                part,
            };
            job(graphs, &mut launches)
        })?
    }
}

/// The launches of one pass after its inputs were uploaded.
pub(super) struct StepLaunches<'a> {
    exec: &'a mut Exec,
    config: &'a Config,
    numerics: Numerics,
    shard: Shard,
    weights: &'a Weights,
    /// State of the model's layers that a step runs through.
    state: &'a mut [LayerState],
    /// State of the layers that draft.
    draft_state: &'a mut [LayerState],
    rotations: &'a Rotations,
    inputs: &'a mut Inputs,
    work: &'a mut Workspace,
    sampler: &'a mut Sampler,
    communicator: &'a dyn Communicator,
    sharing: Sharing,
    step: &'a Step,
    part: PassKind,
}

impl StepLaunches<'_> {
    /// Draws the samples of the step, which has no padding. Passes over blocks have already drawn theirs.
    pub fn sample(&mut self) -> Result<(), OpError> {
        let Self { exec, shard, weights, inputs, work, sampler, communicator, step, .. } = self;
        inputs.common.fill_processors(exec, step, &sampler.sampled)?;
        let communicator = (shard.ranks > 1).then_some(*communicator);
        let Workspace { last_normed, logits_part, .. } = &mut **work;
        let mut head = Head { normed: last_normed, matrix: &weights.head, part: logits_part, communicator };
        sampler.sample(exec, &mut head, &mut inputs.common, &step.samples)
    }
}

/// The forward pass up to the logits of its samples, or up to the tokens of blocks, as captured in a CUDA graph.
impl Launches for StepLaunches<'_> {
    fn exec(&mut self) -> &mut Exec {
        self.exec
    }

    fn launch(&mut self) -> Result<(), OpError> {
        let Self { config, numerics, shard, weights, rotations, communicator, sharing, step, part, .. } = *self;
        let Self { exec, state, draft_state, inputs, work, sampler, .. } = self;
        let previous = &sampler.sampled;
        let mut pass = Pass {
            exec,
            config,
            numerics,
            shard,
            weights,
            rotations,
            inputs,
            work,
            step,
            previous,
            communicator,
            sharing,
        };
        match part {
            PassKind::Layers => pass.run(state, draft_state)?,
            PassKind::Draft { again } => pass.draft(draft_state, again)?,
            PassKind::Blocks => pass.draft_blocks(draft_state)?,
        }
        let communicator = (shard.ranks > 1).then_some(communicator);
        let Workspace { last_normed, logits_part, dspark, .. } = &mut **work;
        let mut head = Head { normed: last_normed, matrix: &weights.head, part: logits_part, communicator };
        match (part, &weights.dspark, dspark) {
            (PassKind::Blocks, Some(weights), Some(work)) => {
                let blocks = (step.rows.len(), step.samples.len() / step.rows.len());
                sampler.run_blocks(exec, &mut MarkovHead { head, weights, work }, &mut inputs.common, blocks)
            }
            _ => sampler.project(exec, &mut head, step.samples.len()),
        }
    }
}
