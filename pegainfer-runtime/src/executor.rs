//! Runs the steps of a model on one device.
//!
//! A step is launched, sampled and finished. On a GPU `launch` enqueues the forward pass up to the logits, and `sample`
//! enqueues the rest. The next step may be launched before the host has seen the tokens of this one. They stay on the
//! device, where the next step's placeholder ids refer to them, and are also copied to the host.

use super::bounds::Bounds;
use super::drafting::{self, DraftVocabulary};
use super::inputs::Inputs;
use super::load_error::LoadError;
use super::measure::Measurable;
use super::model::{Model, Parts, Pass, StepOf, padded, ragged, uniform};
use super::readbacks::Readbacks;
use super::sampler::{Projection, Sampler};
use super::synthetic_acceptance::SyntheticAcceptance;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::{GRAPH_SIZES, Graphs, Launches, Outcome, STEPS_IN_FLIGHT, SampleRow, StepExecutor};
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_kernels::ops::BLOCK_SIZE;
use pegainfer_kernels::sources::Family;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Model, KV cache and workspace on one device.
#[derive(Debug)]
pub struct Executor<M: Model> {
    exec: Exec,
    config: M::Config,
    weights: M::Weights,
    work: M::Workspace,
    cache: M::Cache,
    kv_blocks: usize,
    /// Inputs of the newest step.
    inputs: Inputs,
    sampler: Sampler,
    /// Graphs of decode steps.
    graphs: Graphs,
    /// Readbacks of the steps in flight.
    readbacks: Readbacks,
    /// If the model drafts: the readbacks of its drafts, and the graphs of passes with one token for each row.
    drafting: Option<(Readbacks, Graphs)>,
    /// If its drafts are not taken from the whole vocabulary.
    draft_vocabulary: Option<DraftVocabulary>,
    synthetic: Option<SyntheticAcceptance>,
    /// The steps in flight whose tokens are needed to draft, oldest first.
    followed: VecDeque<StepOf<M>>,
    /// True if the ops of the next steps are timed.
    times_ops: bool,
    /// Op times of the last timed step.
    timed_ops: Vec<(OpRecord, Duration)>,
}

impl<M: Model> Executor<M> {
    /// Allocates workspace and KV cache for loaded weights.
    pub fn new(mut exec: Exec, config: M::Config, weights: M::Weights, bounds: &Bounds) -> Result<Self, LoadError> {
        let info = M::info(&config);
        let mut work = M::workspace(&mut exec, &config, bounds)?;
        let inputs = Inputs::new(&mut exec, info.vocab_size, BLOCK_SIZE, bounds.size)?;
        let sampler = Sampler::new(&mut exec, info.vocab_size, bounds.size.samples)?;
        let readbacks = Readbacks::new(&mut exec, bounds.size.samples)?;
        let graph_rows = bounds.size.rows.min(sampler.max_rows());
        let graphs = || Graphs::new(if bounds.graphs && exec.device() == Device::Cuda { graph_rows } else { 0 });
        let drafting = info.drafts.then(|| (Readbacks::on_demand(bounds.size.rows), graphs()));
        let graphs = graphs();
        let part = bounds.draft_vocab_size.filter(|size| info.drafts && *size < info.vocab_size);
        let draft_vocabulary = part.map(|size| {
            let head = M::draft_output(&mut work, &weights).1;
            DraftVocabulary::new(&mut exec, head, size, bounds.size.rows)
        });
        let draft_vocabulary = draft_vocabulary.transpose()?;
        let kv_blocks = bounds.fitting_blocks(&mut exec)?;
        let parts = Parts { exec: &mut exec, config: &config, weights: &weights, work: &work };
        let cache = M::cache(parts, bounds, kv_blocks)?;
        Ok(Self {
            exec,
            config,
            weights,
            work,
            cache,
            kv_blocks,
            inputs,
            sampler,
            graphs,
            readbacks,
            drafting,
            draft_vocabulary,
            synthetic: None,
            followed: VecDeque::new(),
            times_ops: false,
            timed_ops: Vec::new(),
        })
    }

    /// Benchmarking only; see
    /// [`Speculation::synthetic_acceptance_length`](pegainfer_core::schedule::speculation::Speculation).
    pub fn set_synthetic_acceptance(&mut self, synthetic: Option<SyntheticAcceptance>) {
        self.synthetic = synthetic;
    }

    /// The execution context, to ask about the device.
    pub fn exec(&mut self) -> &mut Exec {
        &mut self.exec
    }

    /// Logits of the first `rows` samples of the last step, in order; waits for the device.
    pub fn logits(&self, rows: usize) -> Result<Vec<f32>, OpError> {
        let mut logits = vec![0f32; rows * M::info(&self.config).vocab_size];
        self.exec.read(self.sampler.logits(), 0, &mut logits)?;
        Ok(logits)
    }

    /// The model's numbers.
    pub fn config(&self) -> &M::Config {
        &self.config
    }

    /// Blocks of the KV pool.
    pub fn kv_blocks(&self) -> usize {
        self.kv_blocks
    }

    /// Steps that ran as a CUDA graph so far.
    pub fn graph_replays(&self) -> u64 {
        self.graphs.replays()
    }

    /// Number of captured CUDA graphs, of decode steps and draft passes.
    pub fn captured_graphs(&self) -> usize {
        self.graphs.captured() + self.drafting.as_ref().map_or(0, |(_, graphs)| graphs.captured())
    }

    /// Captures the CUDA graphs of decode steps and draft passes of up to `rows` rows, largest first, and runs each
    /// once. Decode steps of every size have run before, so their kernels are loaded. Draft passes run twice: the first
    /// loads the kernels, the second is captured. Afterwards no request waits for a capture.
    pub fn capture_graphs(&mut self, rows: usize) -> Result<(), OpError> {
        for size in GRAPH_SIZES.into_iter().rev().filter(|size| *size <= rows) {
            let mut step = uniform::<M>(size, 1, 1);
            step.rows.iter_mut().for_each(|row| row.model_drafts = 2);
            if self.graphs.size(&step).is_some() {
                self.run(&step)?;
            }
        }
        Ok(())
    }

    /// Launches one step, samples and waits for it.
    pub fn run(&mut self, step: &StepOf<M>) -> Result<Outcome, OpError> {
        self.launch(step)?;
        self.sample(step)?;
        self.finish()
    }

    /// Launches the draft passes after `step`, which drew `drawn`, and waits for the drafts of each row.
    fn draft(&mut self, step: &StepOf<M>, drawn: &[u32]) -> Result<Vec<Vec<u32>>, OpError> {
        let Self { exec, config, weights, work, cache, inputs, sampler, drafting, draft_vocabulary, .. } = self;
        let Some((readbacks, graphs)) = drafting else { return Ok(Vec::new()) };
        let (sampler, head) = match draft_vocabulary {
            Some(DraftVocabulary { head, sampler }) => (sampler, Some(&*head)),
            None => (sampler, None),
        };
        let (mut pass, rows) = drafting::first_pass(step, drawn);
        let passes = drafting::passes(&rows);
        for i in 0..passes.max(1) {
            if i > 0 {
                pass = drafting::next_pass(step, &rows, i, BLOCK_SIZE);
            }
            let samples = &pass.samples;
            let size = graphs.size(&pass).filter(|_| !exec.is_recording());
            let padded = size.filter(|size| *size > pass.rows.len()).map(|size| padded::<M>(&pass, size));
            let step = padded.as_ref().unwrap_or(&pass);
            exec.install(|exec| {
                inputs.keep_launches(size.is_some());
                inputs.fill(exec, step)?;
                M::begin_draft(exec, work, step)?;
                let layers = PassLayers::Drafts;
                let mut launch =
                    PassLaunches::<M> { exec, config, weights, cache, work, inputs, sampler, head, step, layers };
                graphs.run(size, &mut launch)?;
                launch.sample(samples)
            })??;
            if !samples.is_empty() {
                readbacks.start(exec, sampler, samples)?;
            }
        }
        drafting::finish(readbacks, step.rows.len(), &rows, passes)
    }

    /// Variant of [`run`](Self::run) that returns the record of every op.
    pub fn record(&mut self, step: &StepOf<M>) -> (Result<Outcome, OpError>, Vec<OpRecord>) {
        self.exec.start_recording();
        let outcome = self.run(step);
        (outcome, self.exec.stop_recording())
    }
}

impl<M: Model> Measurable for Executor<M> {
    const FAMILY: Family = Family::Qwen;

    fn exec(&mut self) -> &mut Exec {
        &mut self.exec
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
    /// of this one.
    fn useful_depth(&self) -> usize {
        if self.exec.device() == Device::Cuda && self.drafting.is_none() { STEPS_IN_FLIGHT } else { 1 }
    }

    fn launch(&mut self, step: &StepOf<M>) -> Result<(), OpError> {
        let Self { exec, config, weights, work, cache, inputs, sampler, graphs, .. } = self;
        let times_ops = self.times_ops && !exec.is_recording();
        if times_ops {
            exec.start_timed_recording();
        }
        if self.drafting.is_some() || self.synthetic.is_some() {
            self.followed.push_back(step.clone());
        }
        // A record is of the ops themselves.
        let size = graphs.size(step).filter(|_| !exec.is_recording());
        let padded = size.filter(|size| *size > step.rows.len()).map(|size| padded::<M>(step, size));
        let step = padded.as_ref().unwrap_or(step);
        let launched = exec.install(|exec| {
            inputs.keep_launches(size.is_some());
            inputs.fill(exec, step)?;
            M::begin(exec, work, step)?;
            let (head, layers) = (None, PassLayers::Layers);
            graphs.run(
                size,
                &mut PassLaunches::<M> { exec, config, weights, cache, work, inputs, sampler, head, step, layers },
            )
        });
        // A failed device reports its error here.
        let launched = launched.and_then(|launched| launched);
        // A step that fails is recorded no further, either.
        if times_ops && launched.is_err() {
            // The launch's own error is the one to report.
            let _ = exec.stop_timed_recording();
        }
        launched
    }

    fn sample(&mut self, step: &StepOf<M>) -> Result<(), OpError> {
        let Self { exec, config, weights, work, cache, inputs, sampler, readbacks, .. } = self;
        let samples = &step.samples;
        let sampled = exec.install(|exec| {
            inputs.fill_processors(exec, step, &sampler.sampled)?;
            let (head, layers) = (None, PassLayers::Layers);
            PassLaunches::<M> { exec, config, weights, cache, work, inputs, sampler, head, step, layers }
                .sample(samples)
        });
        // Since the launch; whether the next step is timed may have been decided meanwhile.
        if exec.is_timing() {
            self.timed_ops = exec.stop_timed_recording().unwrap_or_default();
        }
        sampled.and_then(|sampled| sampled)?;
        readbacks.start(exec, sampler, samples)
    }

    fn finish(&mut self) -> Result<Outcome, OpError> {
        let mut outcome = self.readbacks.finish()?;
        if let Some(step) = self.followed.pop_front().filter(|_| self.exec.device() != Device::Meta) {
            if let Some(synthetic) = &mut self.synthetic {
                synthetic.apply(&step, &mut outcome.tokens);
            }
            let start = Instant::now();
            outcome.drafts = self.draft(&step, &outcome.tokens)?;
            outcome.drafting_time = start.elapsed();
        }
        Ok(outcome)
    }

    fn time_ops(&mut self, on: bool) {
        self.times_ops = on && self.exec.device() != Device::Meta;
    }

    fn take_op_times(&mut self) -> Vec<(&'static str, Duration)> {
        self.take_timed_ops().into_iter().map(|(record, time)| (record.op, time)).collect()
    }

    fn abandon(&mut self) -> Result<(), OpError> {
        let drafts = self.drafting.iter_mut().map(|(readbacks, _)| readbacks);
        drafts.chain([&mut self.readbacks]).for_each(Readbacks::abandon);
        self.followed.clear();
        self.exec.synchronize()
    }
}

/// The layers that a pass runs through.
#[derive(Debug, Clone, Copy)]
enum PassLayers {
    /// Layers of the model.
    Layers,
    /// Layers that draft.
    Drafts,
}

/// The launches of one pass after its inputs were uploaded.
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
    step: &'a StepOf<M>,
    layers: PassLayers,
}

impl<M: Model> PassLaunches<'_, M> {
    /// Draws `samples`, the real samples of a step that may be padded.
    fn sample(&mut self, samples: &[SampleRow]) -> Result<(), OpError> {
        let Self { exec, weights, work, inputs, sampler, head: other_head, layers, .. } = self;
        let (normed, head) = match layers {
            PassLayers::Layers => M::output(work, weights),
            PassLayers::Drafts => M::draft_output(work, weights),
        };
        sampler.sample(exec, &mut Projection { normed, head: other_head.unwrap_or(head) }, inputs, samples)
    }
}

/// The forward pass up to the logits of its samples, as captured in a CUDA graph.
impl<M: Model> Launches for PassLaunches<'_, M> {
    fn exec(&mut self) -> &mut Exec {
        self.exec
    }

    fn launch(&mut self) -> Result<(), OpError> {
        let Self { exec, config, weights, cache, work, inputs, sampler, head: other_head, step, layers } = self;
        let samples = step.samples.len();
        let previous = &sampler.sampled;
        let mut pass = Pass::<M> { exec, config, weights, cache, work, inputs, previous, step };
        let (normed, head) = match layers {
            PassLayers::Layers => {
                M::forward(&mut pass)?;
                M::output(work, weights)
            }
            PassLayers::Drafts => {
                M::draft(&mut pass)?;
                M::draft_output(work, weights)
            }
        };
        sampler.project(exec, &mut Projection { normed, head: other_head.unwrap_or(head) }, samples)
    }
}
