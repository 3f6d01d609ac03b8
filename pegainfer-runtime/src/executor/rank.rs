//! One rank of an executor: its device, its part of the model, and the launches of a pass.

use crate::bounds::Bounds;
use crate::drafting::DraftVocabulary;
use crate::inputs::Inputs;
use crate::load_error::LoadError;
use crate::model::{Model, Parts, Pass, StepOf};
use crate::sampler::{Projection, Sampler};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::parallel::{Communicator, Shard};
use pegainfer_core::schedule::{Graphs, Launches};
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::BLOCK_SIZE;
use std::sync::Arc;

/// A rank: its part of the model, and its device.
#[derive(Debug)]
pub(super) struct Rank<M: Model> {
    pub exec: Exec,
    pub shard: Shard,
    /// The model's numbers for this rank.
    config: M::Config,
    weights: M::Weights,
    work: M::Workspace,
    cache: M::Cache,
    /// Inputs of the newest step.
    inputs: Inputs,
    pub sampler: Sampler,
    /// Graphs of decode steps.
    graphs: Graphs,
    /// Graphs of draft passes with one token for each row.
    draft_graphs: Graphs,
    /// If its drafts are not taken from the whole vocabulary.
    draft_vocabulary: Option<DraftVocabulary>,
    /// The other ranks, if there are any.
    others: Option<OtherRanks>,
}

/// What a rank needs to exchange with others.
#[derive(Debug)]
struct OtherRanks {
    communicator: Arc<dyn Communicator>,
    /// The rank's columns of the logits computed at once, `[logits_rows, vocab / ranks]` f32.
    logits_part: Tensor,
}

/// The layers that a pass runs through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PassLayers {
    /// Layers of the model.
    Layers,
    /// Layers that draft.
    Drafts,
}

/// What is done of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its inputs are uploaded, and its launches are captured in a graph.
    Capture,
    /// The captured graph is launched.
    Replay,
    /// Its inputs are uploaded, and it is launched.
    Whole,
}

impl<M: Model> Rank<M> {
    /// Allocates everything but the cache, whose size depends on all ranks; see [`add_cache`](UncachedRank::add_cache).
    pub fn new(
        (mut exec, shard, weights): (Exec, Shard, M::Weights),
        config: M::Config,
        bounds: &Bounds,
        communicator: Arc<dyn Communicator>,
    ) -> Result<UncachedRank<M>, LoadError> {
        let info = M::info(&config);
        let mut work = M::workspace(&mut exec, &config, bounds)?;
        let inputs = Inputs::new(&mut exec, info.vocab_size, BLOCK_SIZE, bounds.size)?;
        let sampler = Sampler::new(&mut exec, info.vocab_size, bounds.size.samples)?;
        let part = [sampler.max_rows(), info.vocab_size / shard.ranks];
        let others = match shard.ranks {
            1 => None,
            _ => Some(OtherRanks { communicator, logits_part: exec.tensor("logits_part", &part, DType::F32)? }),
        };
        // Several ranks share the whole output matrix instead, each of them a part.
        let size = bounds.draft_vocab_size.filter(|size| info.drafts && *size < info.vocab_size && shard.ranks == 1);
        let draft_vocabulary = size.map(|size| {
            let head = M::draft_output(&mut work, &weights).1;
            DraftVocabulary::new(&mut exec, head, size, bounds.size.rows)
        });
        let draft_vocabulary = draft_vocabulary.transpose()?;
        Ok(UncachedRank { exec, shard, config, weights, work, inputs, sampler, draft_vocabulary, others })
    }

    /// Graphs of passes through these layers.
    pub fn graphs(&self, layers: PassLayers) -> &Graphs {
        match layers {
            PassLayers::Layers => &self.graphs,
            PassLayers::Drafts => &self.draft_graphs,
        }
    }

    /// Sampler of passes through these layers.
    pub fn sampler(&mut self, layers: PassLayers) -> (&mut Exec, &mut Sampler) {
        match (&mut self.draft_vocabulary, layers) {
            (Some(part), PassLayers::Drafts) => (&mut self.exec, &mut part.sampler),
            _ => (&mut self.exec, &mut self.sampler),
        }
    }

    /// Runs a `phase` of a pass through `layers` over `step`, as a CUDA graph of `size` rows if there is one.
    pub fn enqueue(
        &mut self,
        layers: PassLayers,
        step: &StepOf<M>,
        size: Option<usize>,
        phase: Phase,
    ) -> Result<(), OpError> {
        self.on_device(layers, step, |graphs, launches| {
            if phase != Phase::Replay {
                launches.upload(size.is_some())?;
            }
            match phase {
                Phase::Capture => graphs.capture(size, launches),
                Phase::Replay | Phase::Whole => graphs.run(size, launches),
            }
        })
    }

    /// Draws the samples of `step`, which has no padding, after a pass through `layers` over it.
    pub fn sample(&mut self, layers: PassLayers, step: &StepOf<M>) -> Result<(), OpError> {
        self.on_device(layers, step, |_, launches| launches.sample())
    }

    /// Runs `job` on the device, with the launches of a pass through `layers` over `step`.
    fn on_device(
        &mut self,
        layers: PassLayers,
        step: &StepOf<M>,
        job: impl FnOnce(&mut Graphs, &mut PassLaunches<'_, M>) -> Result<(), OpError> + Send,
    ) -> Result<(), OpError> {
        let Self { exec, config, weights, work, cache, inputs, sampler, others, .. } = self;
        let graphs = match layers {
            PassLayers::Layers => &mut self.graphs,
            PassLayers::Drafts => &mut self.draft_graphs,
        };
        let (sampler, head) = match (&mut self.draft_vocabulary, layers) {
            (Some(part), PassLayers::Drafts) => (&mut part.sampler, Some(&part.head)),
            _ => (sampler, None),
        };
        exec.install(|exec| {
            let others = others.as_mut();
            let mut launches =
                PassLaunches { exec, config, weights, cache, work, inputs, sampler, head, others, step, layers };
            job(graphs, &mut launches)
        })?
    }

    /// The normalised output of the last layer for the newest step's samples, for comparison.
    pub fn normed(&mut self) -> (&Exec, &Tensor) {
        (&self.exec, M::output(&mut self.work, &self.weights).0)
    }
}

/// A rank without KV cache and state.
pub(super) struct UncachedRank<M: Model> {
    pub exec: Exec,
    shard: Shard,
    config: M::Config,
    weights: M::Weights,
    work: M::Workspace,
    inputs: Inputs,
    sampler: Sampler,
    draft_vocabulary: Option<DraftVocabulary>,
    others: Option<OtherRanks>,
}

impl<M: Model> UncachedRank<M> {
    /// Allocates a cache of `blocks` blocks.
    pub fn add_cache(self, bounds: &Bounds, blocks: usize) -> Result<Rank<M>, LoadError> {
        let Self { mut exec, shard, config, weights, work, inputs, sampler, draft_vocabulary, others } = self;
        let parts = Parts { exec: &mut exec, config: &config, weights: &weights, work: &work, shard };
        let cache = M::cache(parts, bounds, blocks)?;
        let rows = bounds.size.rows.min(sampler.max_rows());
        let graphs = || Graphs::new(if bounds.graphs && exec.device() == Device::Cuda { rows } else { 0 });
        let (graphs, draft_graphs) = (graphs(), graphs());
        Ok(Rank {
            exec,
            shard,
            config,
            weights,
            work,
            cache,
            inputs,
            sampler,
            graphs,
            draft_graphs,
            draft_vocabulary,
            others,
        })
    }
}

/// The launches of one pass.
struct PassLaunches<'a, M: Model> {
    exec: &'a mut Exec,
    config: &'a M::Config,
    weights: &'a M::Weights,
    cache: &'a mut M::Cache,
    work: &'a mut M::Workspace,
    inputs: &'a mut Inputs,
    sampler: &'a mut Sampler,
    /// Output matrix of `sampler`, if it is not the model's.
    head: Option<&'a Tensor>,
    others: Option<&'a mut OtherRanks>,
    step: &'a StepOf<M>,
    layers: PassLayers,
}

impl<M: Model> PassLaunches<'_, M> {
    /// Uploads the inputs of the pass. `kept`: a CUDA graph keeps its launches.
    fn upload(&mut self, kept: bool) -> Result<(), OpError> {
        let Self { exec, work, inputs, step, .. } = self;
        inputs.keep_launches(kept);
        inputs.fill(exec, step)?;
        match self.layers {
            PassLayers::Layers => M::begin(exec, work, step),
            PassLayers::Drafts => M::begin_draft(exec, work, step),
        }
    }

    /// Draws the samples of the step.
    fn sample(&mut self) -> Result<(), OpError> {
        if self.layers == PassLayers::Layers {
            self.inputs.fill_processors(self.exec, self.step, &self.sampler.sampled)?;
        }
        let step = self.step;
        self.with_projection(|exec, sampler, logits, inputs| sampler.sample(exec, logits, inputs, &step.samples))
    }

    /// Lends the sampler and the GEMM that gives its logits.
    fn with_projection(
        &mut self,
        job: impl FnOnce(&mut Exec, &mut Sampler, &mut Projection<'_>, &mut Inputs) -> Result<(), OpError>,
    ) -> Result<(), OpError> {
        let Self { exec, weights, work, inputs, sampler, head: other_head, others, layers, .. } = self;
        let (normed, head) = match layers {
            PassLayers::Layers => M::output(work, weights),
            PassLayers::Drafts => M::draft_output(work, weights),
        };
        let gather = others.as_mut().map(|others| (&mut others.logits_part, &*others.communicator));
        job(exec, sampler, &mut Projection { normed, head: other_head.unwrap_or(head), gather }, inputs)
    }
}

/// The forward pass up to the logits of its samples, as captured in a CUDA graph.
impl<M: Model> Launches for PassLaunches<'_, M> {
    fn exec(&mut self) -> &mut Exec {
        self.exec
    }

    fn launch(&mut self) -> Result<(), OpError> {
        let Self { exec, config, weights, cache, work, inputs, sampler, others, step, layers, .. } = self;
        let (samples, previous) = (step.samples.len(), &sampler.sampled);
        let communicator = others.as_ref().map(|others| &*others.communicator);
        let mut pass = Pass::<M> { exec, config, weights, cache, work, inputs, previous, step, communicator };
        match layers {
            PassLayers::Layers => M::forward(&mut pass)?,
            PassLayers::Drafts => M::draft(&mut pass)?,
        }
        self.with_projection(|exec, sampler, projection, _| sampler.project(exec, projection, samples))
    }
}
