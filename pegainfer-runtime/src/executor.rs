//! Runs the steps of a model on one or more ranks, each of which has a device and a part of the model.
//!
//! A step is launched, sampled and finished. On a GPU `launch` enqueues the forward pass up to the logits, and `sample`
//! enqueues the rest. The next step may be launched before the host has seen the tokens of this one. They stay on the
//! device, where the next step's placeholder ids refer to them, and are also copied to the host.

mod check;
mod device_copies;
mod disk;
mod draft;
mod experts;
mod host_slots;
mod host_tier;
mod progress;
mod rank;
mod transfers;

use super::block_shape::BlockShape;
use super::bounds::Bounds;
use super::expert_readback::ExpertReadback;
use super::graph_shape::{GraphKey, GraphReplays, GraphShape, padded_to};
use super::load_error::LoadError;
use super::measure::Measurable;
use super::model::{Model, StepOf, ragged, shard_config, speculative};
use super::pass_kind::PassKind;
use super::readbacks::Readbacks;
use super::synthetic_acceptance::SyntheticAcceptance;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::kv::disk::{AlignedMemory, DiskStore};
use pegainfer_core::kv::tiers::{Transfer, TransferDone};
use pegainfer_core::parallel::{Communicator, Ranks, Shard};
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::{GRAPH_SIZES, Outcome, STEPS_IN_FLIGHT, Step, StepAdapters, StepExecutor};
use pegainfer_core::tensor::OpError;
use pegainfer_kernels::parallel;
use pegainfer_kernels::sources::Family;
use rank::{Phase, Rank};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use transfers::Transfers;

/// Time between two looks at copies of a GPU, if there is nothing else to do: those of a few blocks.
const DEVICE_WAIT: Duration = Duration::from_micros(100);

/// Model, KV cache and workspace on all ranks.
#[derive(Debug)]
pub struct Executor<M: Model> {
    /// The numbers of the whole model.
    config: M::Config,
    ranks: Ranks<Rank<M>>,
    kv_blocks: usize,
    /// Readbacks of the tokens that rank 0 draws, for the steps in flight.
    readbacks: Readbacks,
    /// If the model drafts: the readbacks of the drafts of rank 0.
    drafting: Option<Readbacks>,
    /// If it drafts blocks: their shape, and the maximum number in a pass.
    blocks: Option<(BlockShape, usize)>,
    /// If the experts of the steps are counted, which [`count_experts`](Self::count_experts) begins.
    experts: Option<ExpertReadback>,
    synthetic: Option<SyntheticAcceptance>,
    /// True if the ranks are compared after each step.
    checks_ranks: bool,
    /// The steps in flight that are needed after their tokens are known, oldest first: for drafts, a forced acceptance,
    /// or the comparison of the ranks.
    followed: VecDeque<StepOf<M>>,
    /// True if the ops of the next steps are timed.
    times_ops: bool,
    /// Op times of rank 0 in the last timed step.
    timed_ops: Vec<(OpRecord, Duration)>,
    transfers: Transfers,
    /// Transfers that ended between two calls of [`finished_transfers`](StepExecutor::finished_transfers).
    waited_for: Vec<TransferDone>,
}

impl<M: Model> Executor<M> {
    /// Connects the ranks and allocates workspace and KV cache for loaded weights, one of each per rank, rank 0 first.
    /// A single rank of several gets a communicator that loops back.
    pub fn new(
        config: M::Config,
        mut ranks: Vec<(Exec, Shard, M::Weights)>,
        bounds: &Bounds,
    ) -> Result<Self, LoadError> {
        let info = M::info(&config);
        let ends: Vec<Arc<dyn Communicator>> = match &mut ranks[..] {
            [(exec, shard, _)] if shard.ranks > 1 => vec![parallel::loop_back(exec, shard.rank, shard.ranks)?],
            all => parallel::connect(&mut all.iter_mut().map(|(exec, ..)| exec).collect::<Vec<_>>())?,
        };
        let mut uncached = Vec::new();
        for (rank, end) in ranks.into_iter().zip(&ends) {
            let part = shard_config::<M>(&config, rank.1)?;
            uncached.push(Rank::without_cache(rank, part, bounds, end.clone())?);
        }
        let blocks = uncached.iter_mut().map(|rank| bounds.fitting_blocks(&mut rank.exec));
        let kv_blocks = blocks.collect::<Result<Vec<_>, _>>()?.into_iter().min().unwrap_or(0);
        let ranks = uncached.into_iter().map(|rank| rank.add_cache(bounds, kv_blocks)).zip(ends);
        let ranks = ranks.map(|(rank, end)| Ok((rank?, end))).collect::<Result<_, LoadError>>()?;
        let started = Ranks::new(ranks);
        let mut ranks = started.map_err(|e| LoadError::Option(format!("the ranks cannot be started: {e}")))?;
        let readbacks = Readbacks::new(&mut ranks.first_mut().exec, bounds.size.samples)?;
        let device = ranks.first().exec.device();
        let blocks = info.draft_block.map(|block| (block, bounds.blocks(block, device)));
        let draft_samples = blocks.map_or(bounds.size.rows, |_| bounds.logits_rows(device));
        Ok(Self {
            config,
            ranks,
            kv_blocks,
            readbacks,
            drafting: info.drafts.then(|| Readbacks::on_demand(draft_samples)),
            blocks,
            experts: None,
            synthetic: None,
            checks_ranks: false,
            followed: VecDeque::new(),
            times_ops: false,
            timed_ops: Vec::new(),
            transfers: Transfers::default(),
            waited_for: Vec::new(),
        })
    }

    /// An executor with one rank; see [`new`](Self::new).
    pub fn on_one(exec: Exec, config: M::Config, weights: M::Weights, bounds: &Bounds) -> Result<Self, LoadError> {
        Self::new(config, vec![(exec, Shard::WHOLE, weights)], bounds)
    }

    /// Benchmarking only; see
    /// [`Speculation::synthetic_acceptance_length`](pegainfer_core::schedule::speculation::Speculation).
    pub fn set_synthetic_acceptance(&mut self, synthetic: Option<SyntheticAcceptance>) {
        self.synthetic = synthetic;
    }

    /// Compares all ranks bit for bit after each step from now on; a difference is an error of the step. For
    /// development: slow. No effect with one rank.
    pub fn check_ranks(&mut self) {
        self.checks_ranks = self.ranks.count() > 1;
    }

    /// The execution context of rank 0, to ask about the device.
    pub fn exec(&mut self) -> &mut Exec {
        &mut self.ranks.first_mut().exec
    }

    /// Logits of the first `rows` samples of the last step, in order; waits for the device.
    pub fn logits(&self, rows: usize) -> Result<Vec<f32>, OpError> {
        let Rank { exec, sampler, .. } = self.ranks.first();
        let (vocab, padded) = (M::info(&self.config).vocab_size, sampler.logits().rows_cols().1);
        let mut logits = vec![0f32; rows * padded];
        exec.read(sampler.logits(), 0, &mut logits)?;
        Ok(logits.chunks_exact(padded).flat_map(|row| &row[..vocab]).copied().collect())
    }

    /// Number of ranks that this process runs.
    pub fn held_ranks(&self) -> usize {
        self.ranks.count()
    }

    /// The model's numbers.
    pub fn config(&self) -> &M::Config {
        &self.config
    }

    /// Blocks of the KV pool.
    pub fn kv_blocks(&self) -> usize {
        self.kv_blocks
    }

    /// Elements of a vector, see [`Outcome::vectors`].
    pub fn hidden_size(&mut self) -> usize {
        self.ranks.first_mut().hidden_size()
    }

    /// Passes that ran as a CUDA graph so far.
    pub fn graph_replays(&self) -> GraphReplays {
        GraphReplays::of(&self.ranks.first().graphs)
    }

    /// Number of captured CUDA graphs, of steps and of passes that draft.
    pub fn captured_graphs(&self) -> usize {
        self.ranks.first().graphs.captured()
    }

    /// Pads later steps of up to `rows` rows as for CUDA graphs, but runs them launch by launch, for tests on devices
    /// without graphs.
    pub fn only_pad(&mut self, rows: usize) -> Result<(), OpError> {
        self.ranks.run(|rank| {
            rank.only_pad(rows);
            Ok(())
        })
    }

    /// Bytes of a KV block and of a state over all ranks; an error, as a sentence, if this model has no copies.
    pub(crate) fn kept_sizes(&mut self) -> Result<[usize; 2], LoadError> {
        Transfers::sizes(&mut self.ranks)
    }

    /// Reserves host memory of up to `bytes` bytes for copies of blocks and states of these sizes; returns the numbers
    /// of slots.
    pub(crate) fn open_host_slots(&mut self, bytes: u64, sizes: [usize; 2]) -> Result<[usize; 2], LoadError> {
        self.transfers.open_host_slots(&mut self.ranks, bytes, sizes)
    }

    /// Also copies blocks to this file, and states to the other one.
    pub(crate) fn use_disk(&mut self, blocks: DiskStore<AlignedMemory>, states: Option<DiskStore<AlignedMemory>>) {
        self.transfers.use_disk(blocks, states);
    }

    /// Runs `job` on the device of each rank and on the rank's numbers, such as a number of layers for warm-ups.
    pub fn on_each_rank(
        &mut self,
        job: impl Fn(&mut Exec, &mut M::Config) -> Result<(), OpError> + Send + Sync,
    ) -> Result<(), OpError> {
        self.ranks.run(|Rank { exec, config, .. }| exec.install(|exec| job(exec, config))?)
    }

    /// Captures the CUDA graphs of decode steps of up to `rows` rows and of draft passes, largest first, and runs each
    /// once; with [`Model::SHAPED_GRAPHS`], also those of steps that verify `drafts` tokens per row. Afterwards no
    /// request waits for these. If adapters are enabled, also those of steps with adapters. Decode steps of every size
    /// have run before, on this executor or, if `is_warm`, on another with the same devices, so their kernels are
    /// loaded; otherwise a first run loads them. Draft passes run twice: the first loads the kernels, the second is
    /// captured.
    pub fn capture_graphs(&mut self, rows: usize, drafts: usize, is_warm: bool) -> Result<(), OpError> {
        let block = self.blocks.map_or(1, |(shape, _)| shape.tokens);
        let (kinds, runs, wanted) = match M::SHAPED_GRAPHS {
            true => (if drafts == 0 { 0..1 } else { 0..2 }, 2, drafts),
            false => (0..1, 1, 2),
        };
        for size in GRAPH_SIZES.into_iter().rev().filter(|size| *size <= rows) {
            for verified in kinds.clone() {
                let step = speculative::<M>(size, (verified * drafts, wanted), block);
                for step in self.with_adapters(step) {
                    if let Some(key) = self.ranks.first().graph_key(PassKind::Layers, &step) {
                        if is_warm {
                            self.ranks.run(|rank| {
                                rank.graphs.expect(key);
                                Ok(())
                            })?;
                        }
                        (0..runs).try_for_each(|_| self.run(&step).map(drop))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The step, and if adapters are enabled the same step with the adapter of the first slot, whatever that holds.
    pub(crate) fn with_adapters(&self, step: StepOf<M>) -> Vec<StepOf<M>> {
        if self.ranks.first().has_adapters() {
            let adapters = StepAdapters { rows: vec![0; step.rows.len()], held: Vec::new() };
            return vec![step.clone(), Step { adapters, ..step }];
        }
        vec![step]
    }

    /// Launches one step, samples and waits for it.
    pub fn run(&mut self, step: &StepOf<M>) -> Result<Outcome, OpError> {
        self.launch(step)?;
        self.sample(step)?;
        self.finish()
    }

    /// Enqueues a pass over `step` on all ranks, up to the logits of its samples, or up to the tokens of blocks.
    /// Returns the key of its CUDA graph.
    fn enqueue(&mut self, kind: PassKind, step: &StepOf<M>) -> Result<Option<GraphKey>, OpError> {
        let first = self.ranks.first();
        let key = first.graph_key(kind, step);
        let captures = first.graphs.should_capture(key);
        let padded = key.filter(|key| key.shape != GraphShape::of(step)).map(|key| padded_to::<M>(step, key));
        let step = padded.as_ref().unwrap_or(step);
        if captures {
            // All ranks capture before any of them runs: a running rank waits on its device for the others, and
            // capturing waits for the device.
            self.ranks.run(|rank| rank.enqueue(kind, step, key, Phase::Capture))?;
        }
        let phase = if captures { Phase::Replay } else { Phase::Whole };
        self.ranks.run(|rank| rank.enqueue(kind, step, key, phase))?;
        Ok(key)
    }

    /// Enqueues the draws of a pass over `step` on all ranks, and the readback of their tokens.
    fn draw(&mut self, kind: PassKind, step: &StepOf<M>) -> Result<(), OpError> {
        self.ranks.run(|rank| rank.sample(kind, step))?;
        let (exec, sampler, normed) = self.ranks.first_mut().sampler(kind);
        match (kind, &mut self.drafting) {
            (PassKind::Layers, _) => {
                self.readbacks.start(exec, sampler, normed, &step.samples)?;
                self.start_counting(step.tokens.len())
            }
            (_, Some(readbacks)) if !step.samples.is_empty() => readbacks.start(exec, sampler, None, &step.samples),
            _ => Ok(()),
        }
    }

    /// Variant of [`run`](Self::run) that returns the record of every op of rank 0.
    pub fn record(&mut self, step: &StepOf<M>) -> (Result<Outcome, OpError>, Vec<OpRecord>) {
        self.exec().start_recording();
        let outcome = self.run(step);
        (outcome, self.exec().stop_recording())
    }
}

impl<M: Model> Measurable for Executor<M> {
    const FAMILY: Family = M::FAMILY;

    fn exec(&mut self) -> &mut Exec {
        &mut self.ranks.first_mut().exec
    }

    fn step(rows: &[(usize, usize)]) -> StepOf<M> {
        ragged::<M>(rows)
    }

    fn take_timed_ops(&mut self) -> Vec<(OpRecord, Duration)> {
        std::mem::take(&mut self.timed_ops)
    }
}

impl<M: Model> StepExecutor for Executor<M> {
    type State = M::State;

    /// A device that computes concurrently with the host can have the next step waiting, unless that starts with drafts
    /// of this one, or the ranks are compared in between.
    fn useful_depth(&self) -> usize {
        let waits = self.drafting.is_some() || self.checks_ranks;
        if self.ranks.first().exec.device() == Device::Cuda && !waits { STEPS_IN_FLIGHT } else { 1 }
    }

    fn launch(&mut self, step: &StepOf<M>) -> Result<(), OpError> {
        let times_ops = self.times_ops && !self.exec().is_recording();
        if times_ops {
            self.exec().start_timed_recording();
        }
        if self.drafting.is_some() || self.synthetic.is_some() || self.checks_ranks {
            self.followed.push_back(step.clone());
        }
        let launched = self.enqueue(PassKind::Layers, step).map(drop);
        // A step that fails is recorded no further, either.
        if times_ops && launched.is_err() {
            // The launch's own error is the one to report.
            let _ = self.exec().stop_timed_recording();
        }
        launched
    }

    fn sample(&mut self, step: &StepOf<M>) -> Result<(), OpError> {
        let sampled = self.draw(PassKind::Layers, step);
        // Since the launch; whether the next step is timed may have been decided meanwhile.
        if self.exec().is_timing() {
            self.timed_ops = self.exec().stop_timed_recording().unwrap_or_default();
        }
        sampled
    }

    fn finish(&mut self) -> Result<Outcome, OpError> {
        let step = self.followed.pop_front().filter(|_| self.ranks.first().exec.device() != Device::Meta);
        let outcome = self.readbacks.finish();
        let experts = self.experts.as_mut().map(ExpertReadback::finish);
        // The error of another rank explains that of rank 0, which has waited for it.
        self.ranks.check()?;
        let mut outcome = outcome?;
        outcome.experts = experts.transpose()?.flatten();
        if let Some(step) = step {
            if self.checks_ranks {
                check::same_on_all_ranks(&mut self.ranks, &step)?;
            }
            if let Some(synthetic) = &mut self.synthetic {
                synthetic.apply(&step, &mut outcome.tokens);
            }
            let start = Instant::now();
            outcome.drafts = self.draft(&step, &outcome.tokens)?;
            outcome.drafting_time = start.elapsed();
        }
        Ok(outcome)
    }

    fn start_transfer(&mut self, transfer: Transfer) {
        let failed = self.transfers.start(&mut self.ranks, transfer);
        self.waited_for.extend(failed);
    }

    fn finished_transfers(&mut self) -> Vec<TransferDone> {
        let mut done = std::mem::take(&mut self.waited_for);
        done.extend(self.transfers.copy_some(&mut self.ranks, Duration::ZERO));
        done
    }

    /// Waits for the disk and the device only: what else is to be copied is copied by the next
    /// [`finished_transfers`](StepExecutor::finished_transfers).
    fn wait_for_transfers(&mut self, limit: Duration) {
        if self.transfers.waits_for_device() {
            std::thread::sleep(DEVICE_WAIT.min(limit));
        } else if self.transfers.waits_for_disk() {
            let done = self.transfers.copy_some(&mut self.ranks, limit);
            self.waited_for.extend(done);
        }
    }

    fn time_ops(&mut self, on: bool) {
        self.times_ops = on && self.ranks.first().exec.device() != Device::Meta;
    }

    fn take_op_times(&mut self) -> Vec<(&'static str, Duration)> {
        self.take_timed_ops().into_iter().map(|(record, time)| (record.op, time)).collect()
    }

    fn abandon(&mut self) -> Result<(), OpError> {
        self.drafting.iter_mut().chain([&mut self.readbacks]).for_each(Readbacks::abandon);
        self.experts.iter_mut().for_each(ExpertReadback::abandon);
        self.followed.clear();
        self.ranks.run(|rank| rank.exec.synchronize())
    }
}
