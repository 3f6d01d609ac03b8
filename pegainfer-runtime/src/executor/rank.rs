//! One rank of an executor: its device, its part of the model, and the launches of a pass.

use super::host_tier::HostTier;
use crate::bounds::Bounds;
use crate::drafting::DraftVocabulary;
use crate::graph_shape::{GraphBounds, GraphKey};
use crate::inputs::Inputs;
use crate::load_error::LoadError;
use crate::lora::AdapterMemory;
use crate::model::{Model, Parts, Pass, StepOf};
use crate::pass_kind::PassKind;
use crate::sampler::{Projection, Sampler};
use crate::vocab_padding::{VocabPadding, padded_vocab};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::kv::tiers::{BlockCopy, Direction, TransferId};
use pegainfer_core::parallel::{Communicator, Shard};
use pegainfer_core::schedule::{Graphs, Launches};
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::Matrix;
use std::sync::Arc;

/// A rank: its part of the model, and its device.
#[derive(Debug)]
pub(super) struct Rank<M: Model> {
    pub shard: Shard,
    /// The model's numbers for this rank.
    pub config: M::Config,
    weights: M::Weights,
    work: M::Workspace,
    cache: M::Cache,
    /// Copies of KV blocks and of states in host memory, if there are any.
    host_tier: Option<HostTier>,
    /// Inputs of the newest step.
    inputs: Inputs,
    /// Adapters, if enabled.
    lora: Option<AdapterMemory>,
    pub sampler: Sampler,
    /// Graphs of steps and of passes that draft.
    pub graphs: Graphs<GraphKey>,
    graph_bounds: GraphBounds,
    /// If its drafts are not taken from the whole vocabulary.
    draft_vocabulary: Option<DraftVocabulary>,
    /// If the output matrix has rows that are no token ids.
    padding: Option<VocabPadding>,
    /// The other ranks, if there are any.
    others: Option<OtherRanks>,
    /// Dropped last: another engine may continue with the device at once.
    pub exec: Exec,
}

/// What a rank needs to exchange with others.
#[derive(Debug)]
struct OtherRanks {
    communicator: Arc<dyn Communicator>,
    /// The rank's columns of the logits computed at once, `[logits_rows, vocab / ranks]` f32.
    logits_part: Tensor,
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
    pub fn without_cache(
        (mut exec, shard, mut weights): (Exec, Shard, M::Weights),
        config: M::Config,
        bounds: &Bounds,
        communicator: Arc<dyn Communicator>,
    ) -> Result<UncachedRank<M>, LoadError> {
        let info = M::info(&config);
        M::finish_weights(&mut exec, &mut weights, &config)?;
        let mut work = M::workspace(&mut exec, &config, bounds)?;
        let vocab = padded_vocab(info.vocab_size, shard.ranks);
        let inputs = Inputs::new(&mut exec, vocab, M::BLOCK_TOKENS, bounds.size)?;
        let lora = match bounds.lora {
            None => None,
            Some(options) => {
                let layers = M::adapted(&config).map_err(LoadError::Option)?;
                Some(AdapterMemory::new(&mut exec, &layers, options, bounds.size)?)
            }
        };
        let sampler = Sampler::new(&mut exec, vocab, bounds.size.samples)?;
        let padding = VocabPadding::new(&mut exec, info.vocab_size, vocab, sampler.max_rows())?;
        let part = [sampler.max_rows(), vocab / shard.ranks];
        let others = match shard.ranks {
            1 => None,
            _ => Some(OtherRanks { communicator, logits_part: exec.tensor("logits_part", &part, DType::F32)? }),
        };
        // Several ranks share the whole output matrix instead, each of them a part.
        let size = bounds.draft_vocab_size.filter(|size| info.drafts && *size < info.vocab_size && shard.ranks == 1);
        let draft_vocabulary = match (size, M::draft_output(&mut work, &weights).1) {
            (Some(size), Matrix::Bf16(head)) => Some(DraftVocabulary::new(&mut exec, head, size, bounds.size.rows)?),
            _ => None,
        };
        Ok(UncachedRank {
            exec,
            shard,
            config,
            weights,
            work,
            inputs,
            lora,
            sampler,
            draft_vocabulary,
            padding,
            others,
        })
    }

    /// Pads later steps of up to `rows` rows as for CUDA graphs, but runs them launch by launch.
    pub fn only_pad(&mut self, rows: usize) {
        self.graphs = Graphs::padding_only(rows.min(self.sampler.max_rows()));
    }

    /// Key of the graph of a pass of this kind over `step`; `None` if it runs launch by launch.
    pub fn graph_key(&self, kind: PassKind, step: &StepOf<M>) -> Option<GraphKey> {
        // A record is of the ops themselves.
        self.graph_bounds.key(&self.graphs, kind, step).filter(|_| !self.exec.is_recording())
    }

    /// Elements of what logits are computed from.
    pub fn hidden_size(&mut self) -> usize {
        M::output(&mut self.work, &self.weights).0.rows_cols().1
    }

    /// The KV cache and other state.
    pub fn cache_mut(&mut self) -> &mut M::Cache {
        &mut self.cache
    }

    /// Reserves host memory for copies of so many blocks and states.
    pub fn open_host_tier(&mut self, slots: [usize; 2]) -> Result<(), OpError> {
        let tensors = M::kept_tensors(&mut self.cache).unwrap_or_default();
        self.host_tier = Some(self.exec.install(|exec| HostTier::new(exec, &tensors, slots))??);
        Ok(())
    }

    /// Copies of KV blocks and states in host memory; an error without.
    pub fn host_tier(&mut self) -> Result<&mut HostTier, OpError> {
        let none = || OpError { op: "host tier", message: "there is no host tier".to_owned() };
        self.host_tier.as_mut().ok_or_else(none)
    }

    /// Begins to copy the rank's part of these blocks and states; see [`HostTier::begin`].
    pub fn begin_copies(
        &mut self,
        transfer: (TransferId, Direction),
        copies: [&[BlockCopy]; 2],
        ends: bool,
    ) -> Result<(), OpError> {
        let Some(tier) = &mut self.host_tier else { return self.host_tier().map(drop) };
        let tensors = M::kept_tensors(&mut self.cache).unwrap_or_default();
        self.exec.install(|exec| tier.begin(exec, transfer, copies, tensors, ends))?
    }

    /// Ends a transfer that failed on some rank, once nothing is copied any more.
    pub fn give_up_copies(&mut self, id: TransferId) -> Result<(), OpError> {
        let Some(tier) = &mut self.host_tier else { return Ok(()) };
        self.exec.install(|exec| tier.give_up(exec, id))?
    }

    /// True if adapters are enabled.
    pub fn has_adapters(&self) -> bool {
        self.lora.is_some()
    }

    /// Sampler of passes of this kind; after a pass over the layers also what the logits were computed from.
    pub fn sampler(&mut self, kind: PassKind) -> (&mut Exec, &mut Sampler, Option<&mut Tensor>) {
        let normed = (kind == PassKind::Layers).then(|| M::output(&mut self.work, &self.weights).0);
        let sampler = match (&mut self.draft_vocabulary, kind) {
            (Some(part), PassKind::Drafts { .. }) => &mut part.sampler,
            _ => &mut self.sampler,
        };
        (&mut self.exec, sampler, normed)
    }

    /// See [`Model::chosen_experts`].
    pub fn chosen_experts(&mut self, layer: usize, tokens: usize) -> Option<(&mut Exec, &Tensor)> {
        Some((&mut self.exec, M::chosen_experts(&mut self.work, layer, tokens)?))
    }

    /// Runs a `phase` of a pass of this kind over `step`, as the CUDA graph `key` if there is one.
    pub fn enqueue(
        &mut self,
        kind: PassKind,
        step: &StepOf<M>,
        key: Option<GraphKey>,
        phase: Phase,
    ) -> Result<(), OpError> {
        self.on_device(kind, step, |graphs, launches| {
            if phase != Phase::Replay {
                launches.upload(key.is_some())?;
            }
            match phase {
                Phase::Capture => graphs.capture(key, launches),
                Phase::Replay | Phase::Whole => graphs.run(key, launches),
            }
        })
    }

    /// Draws the samples of `step`, which has no padding, after a pass of this kind over it.
    pub fn sample(&mut self, kind: PassKind, step: &StepOf<M>) -> Result<(), OpError> {
        self.on_device(kind, step, |_, launches| launches.sample())
    }

    /// See [`Model::hashes`]; `step` is the newest one.
    pub fn hashes(&mut self, step: &StepOf<M>) -> Result<Vec<(String, u64)>, OpError> {
        self.on_device(PassKind::Layers, step, |_, launches| M::hashes(&mut launches.pass()))
    }

    /// Runs `job` on the device, with the launches of a pass of this kind over `step`.
    fn on_device<R: Send>(
        &mut self,
        kind: PassKind,
        step: &StepOf<M>,
        job: impl FnOnce(&mut Graphs<GraphKey>, &mut PassLaunches<'_, M>) -> Result<R, OpError> + Send,
    ) -> Result<R, OpError> {
        let Self { exec, shard, config, weights, work, cache, inputs, lora, sampler, graphs, padding, others, .. } =
            self;
        let (sampler, head, padding) = match (&mut self.draft_vocabulary, kind) {
            (Some(part), PassKind::Drafts { .. }) => (&mut part.sampler, Some(&part.head), None),
            _ => (sampler, None, padding.as_mut()),
        };
        exec.install(|exec| {
            let (others, rank) = (others.as_mut(), shard.rank);
            let lora = lora.as_mut().filter(|_| kind == PassKind::Layers && !step.adapters.is_empty());
            let lora = lora.map(|lora| (lora, rank));
            let mut launches = PassLaunches {
                exec,
                config,
                weights,
                cache,
                work,
                inputs,
                lora,
                sampler,
                head,
                padding,
                others,
                step,
                kind,
            };
            job(graphs, &mut launches)
        })?
    }
}

/// A rank without KV cache and state.
pub(super) struct UncachedRank<M: Model> {
    shard: Shard,
    config: M::Config,
    weights: M::Weights,
    work: M::Workspace,
    inputs: Inputs,
    lora: Option<AdapterMemory>,
    sampler: Sampler,
    draft_vocabulary: Option<DraftVocabulary>,
    padding: Option<VocabPadding>,
    others: Option<OtherRanks>,
    /// Dropped last, as in [`Rank`].
    pub exec: Exec,
}

impl<M: Model> UncachedRank<M> {
    /// Allocates a cache of `blocks` blocks.
    pub fn add_cache(self, bounds: &Bounds, blocks: usize) -> Result<Rank<M>, LoadError> {
        let Self { mut exec, shard, config, weights, work, inputs, lora, sampler, draft_vocabulary, padding, others } =
            self;
        let parts = Parts { exec: &mut exec, config: &config, weights: &weights, work: &work, shard };
        let cache = M::cache(parts, bounds, blocks)?;
        let rows = bounds.size.rows.min(sampler.max_rows());
        let graphs = Graphs::new(if bounds.graphs && exec.device() == Device::Cuda { rows } else { 0 });
        let graph_bounds = GraphBounds::new::<M>(bounds, exec.device(), M::info(&config).draft_block);
        Ok(Rank {
            exec,
            shard,
            config,
            weights,
            work,
            cache,
            host_tier: None,
            inputs,
            lora,
            sampler,
            graphs,
            graph_bounds,
            draft_vocabulary,
            padding,
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
    /// Memory of the adapters, if the step has any, and the number of the rank.
    lora: Option<(&'a mut AdapterMemory, usize)>,
    sampler: &'a mut Sampler,
    /// Output matrix of `sampler`, if it is not the model's.
    head: Option<&'a Matrix>,
    /// See [`Projection::padding`].
    padding: Option<&'a mut VocabPadding>,
    others: Option<&'a mut OtherRanks>,
    step: &'a StepOf<M>,
    kind: PassKind,
}

impl<M: Model> PassLaunches<'_, M> {
    /// What the model gets of the pass.
    fn pass(&mut self) -> Pass<'_, M> {
        let Self { exec, config, weights, cache, work, inputs, lora, sampler, others, step, kind, .. } = self;
        let adapters = lora.as_mut().map(|(lora, _)| lora.adapters());
        let communicator = others.as_ref().map(|others| &*others.communicator);
        let (previous, kind) = (&sampler.sampled, *kind);
        Pass { exec, config, weights, cache, work, inputs, previous, step, adapters, kind, communicator }
    }

    /// Uploads the inputs of the pass. `kept`: a CUDA graph keeps its launches.
    fn upload(&mut self, kept: bool) -> Result<(), OpError> {
        self.inputs.keep_launches(kept);
        self.inputs.fill(self.exec, self.step)?;
        if let Some((lora, rank)) = &mut self.lora {
            lora.fill(self.exec, self.step, *rank)?;
        }
        match self.kind {
            PassKind::Layers => M::begin(&mut self.pass()),
            PassKind::Drafts { .. } | PassKind::Blocks => M::begin_draft(&mut self.pass()),
        }
    }

    /// Draws the samples of the step. Passes over blocks have already drawn theirs.
    fn sample(&mut self) -> Result<(), OpError> {
        if self.kind == PassKind::Layers {
            self.inputs.fill_processors(self.exec, self.step, &self.sampler.sampled)?;
        }
        let step = self.step;
        self.with_projection(|exec, sampler, logits, inputs| sampler.sample(exec, logits, inputs, &step.samples))
    }

    /// Lends the sampler and the GEMM that gives its logits.
    fn with_projection(
        &mut self,
        job: impl FnOnce(&mut Exec, &mut Sampler, &mut Projection<'_, M>, &mut Inputs) -> Result<(), OpError>,
    ) -> Result<(), OpError> {
        let Self { exec, weights, work, inputs, sampler, head, padding, others, kind, .. } = self;
        let gather = others.as_mut().map(|others| (&mut others.logits_part, &*others.communicator));
        let padding = padding.as_deref_mut();
        job(exec, sampler, &mut Projection { work, weights, kind: *kind, head: *head, gather, padding }, inputs)
    }
}

/// The forward pass up to the logits of its samples, or up to the tokens of blocks, as captured in a CUDA graph.
impl<M: Model> Launches for PassLaunches<'_, M> {
    fn exec(&mut self) -> &mut Exec {
        self.exec
    }

    fn launch(&mut self) -> Result<(), OpError> {
        match self.kind {
            PassKind::Layers => M::forward(&mut self.pass())?,
            PassKind::Drafts { .. } | PassKind::Blocks => M::draft(&mut self.pass())?,
        }
        let (kind, rows, samples) = (self.kind, self.step.rows.len(), self.step.samples.len());
        self.with_projection(|exec, sampler, projection, inputs| match kind {
            PassKind::Blocks => sampler.run_blocks(exec, projection, inputs, (rows, samples / rows)),
            PassKind::Layers | PassKind::Drafts { .. } => sampler.project(exec, projection, samples),
        })
    }
}
