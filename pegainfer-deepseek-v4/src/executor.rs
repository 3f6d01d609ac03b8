//! Runs a step: the DeepSeek-V4 forward pass on every rank, written once over ops.

use crate::bounds::StepBounds;
use crate::config::Config;
use crate::forward::{Head, Pass};
use crate::inputs::Inputs;
use crate::load_error::LoadError;
use crate::numerics::Numerics;
use crate::plan::{self, Outcome, Step};
use crate::rotations::Rotations;
use crate::shard::Shard;
use crate::state::{self, LayerState};
use crate::weights::Weights;
use crate::workspace::Workspace;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::parallel::{Communicator, Ranks};
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::{Graphs, Launches, STEPS_IN_FLIGHT, StateSlots, StepExecutor};
use pegainfer_core::tensor::OpError;
use pegainfer_kernels::ops::deepseek_v4::plan_gemms;
use pegainfer_kernels::parallel;
use pegainfer_kernels::runtime::{Measurable, Readbacks, Sampler};
use std::sync::Arc;
use std::time::Duration;

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
    /// Of decode steps.
    graphs: Graphs,
    communicator: Arc<dyn Communicator>,
    /// Layers that a step runs: all but in a warm-up.
    layers: usize,
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
        let graphs = Graphs::new(if bounds.graphs && exec.device() == Device::Cuda { sampler.max_rows() } else { 0 });
        let layers = weights.layers.len();
        Ok(Self { exec, shard, weights, state, rotations, inputs, work, sampler, graphs, communicator, layers })
    }

    /// Uploads `step`, and moves the state of rows that change their slot.
    fn begin(&mut self, step: &Step) -> Result<(), OpError> {
        let Self { exec, state, inputs, work, .. } = self;
        exec.install(|exec| {
            inputs.fill(exec, step)?;
            work.set_rows(step.tokens.len());
            state::copy_slots(exec, state, step)
        })?
    }

    /// Makes the graph of steps of `size`, if it is time.
    fn capture(
        &mut self,
        config: &Config,
        numerics: Numerics,
        step: &Step,
        size: Option<usize>,
    ) -> Result<(), OpError> {
        self.on_device(config, numerics, step, |graphs, launches| graphs.capture(size, launches))
    }

    /// Launches a step, for which the rank has begun.
    fn run(&mut self, config: &Config, numerics: Numerics, step: &Step, size: Option<usize>) -> Result<(), OpError> {
        self.on_device(config, numerics, step, |graphs, launches| graphs.run(size, launches))
    }

    fn on_device(
        &mut self,
        config: &Config,
        numerics: Numerics,
        step: &Step,
        job: impl FnOnce(&mut Graphs, &mut StepLaunches<'_>) -> Result<(), OpError> + Send,
    ) -> Result<(), OpError> {
        let Self { exec, shard, weights, state, rotations, inputs, work, sampler, graphs, communicator, layers } = self;
        let (shard, communicator, state) = (*shard, &**communicator, &mut state[..*layers]);
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
    /// Of the layers that run.
    state: &'a mut [LayerState],
    rotations: &'a Rotations,
    inputs: &'a mut Inputs,
    work: &'a mut Workspace,
    sampler: &'a mut Sampler,
    communicator: &'a dyn Communicator,
    step: &'a Step,
}

impl Launches for StepLaunches<'_> {
    fn exec(&mut self) -> &mut Exec {
        self.exec
    }

    fn launch(&mut self) -> Result<(), OpError> {
        let Self { config, numerics, shard, weights, rotations, communicator, step, .. } = *self;
        let Self { exec, state, inputs, work, sampler, .. } = self;
        // A step may ask for any token of the one before, and a graph keeps the length.
        sampler.sampled.set_rows(sampler.sampled.max_rows());
        let previous = &sampler.sampled;
        let mut pass =
            Pass { exec, config, numerics, shard, weights, rotations, inputs, work, step, previous, communicator };
        pass.run(state)?;
        let communicator = (shard.ranks > 1).then_some(communicator);
        let (normed, part) = (&mut work.last_normed, &mut work.logits_part);
        let mut head = Head { normed, matrix: &weights.head, part, communicator };
        sampler.run_with(exec, &mut head, &mut inputs.common, &step.samples)
    }
}

/// Tokens of the smallest step of a warm-up, above those that run as decode steps do.
const MIN_WARM_UP: usize = 256;

/// The first layers, in which every kind of attention and of router occurs.
fn distinct_layers(config: &Config) -> usize {
    let kind = |i: usize| (config.layers[i], i < config.hash_layers);
    let is_new = |i: &usize| !(0..*i).any(|before| kind(before) == kind(*i));
    (0..config.layers.len()).rfind(is_new).map_or(0, |i| i + 1)
}

/// The model on all of its ranks.
#[derive(Debug)]
pub struct Executor {
    config: Arc<Config>,
    numerics: Numerics,
    ranks: Ranks<Rank>,
    /// Of rank 0.
    readbacks: Readbacks,
    /// Whether to time the ops of the next step.
    times_ops: bool,
    /// The ops of rank 0 in the last step whose ops were timed.
    timed_ops: Vec<(OpRecord, Duration)>,
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
        let config = Arc::new(config);
        Ok(Self { config, numerics, ranks, readbacks, times_ops: false, timed_ops: Vec::new() })
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

    /// Loads kernels, and lets cuBLASLt choose its own, for steps of up to `tokens` tokens: the first requests would wait for that.
    /// Runs the first layers, in which there is one of each kind. Without a GPU there is nothing to do.
    pub fn warm_up(&mut self, tokens: usize) -> Result<(), OpError> {
        if self.ranks.first().exec.device() != Device::Cuda {
            return Ok(());
        }
        self.set_layers(distinct_layers(&self.config))?;
        let sizes = std::iter::successors(Some(MIN_WARM_UP), |tokens| Some(2 * tokens)).take_while(|n| *n < tokens);
        let ran = sizes.chain([tokens]).try_for_each(|n| self.run(&plan::uniform(1, n, n)).map(drop));
        self.set_layers(self.config.layers.len())?;
        ran?;
        self.ranks.run(move |rank| {
            plan_gemms(&mut rank.exec, tokens);
            Ok(())
        })
    }

    fn set_layers(&mut self, layers: usize) -> Result<(), OpError> {
        self.ranks.run(move |rank| {
            rank.layers = layers;
            Ok(())
        })
    }

    /// As [`run`](Self::run), with the record of every op of rank 0.
    pub fn record(&mut self, step: &Step) -> (Result<Outcome, OpError>, Vec<OpRecord>) {
        self.ranks.first_mut().exec.start_recording();
        let outcome = self.run(step);
        (outcome, self.ranks.first_mut().exec.stop_recording())
    }

    /// Enqueues a step on all ranks, and the readback of its tokens.
    fn launch_on_ranks(&mut self, step: &Step) -> Result<(), OpError> {
        let (config, numerics, Rank { exec, graphs, .. }) = (self.config.clone(), self.numerics, self.ranks.first());
        // A record is of the ops themselves.
        let size = graphs.size(step).filter(|_| !exec.is_recording());
        let captures = graphs.captures(size);
        let shared = Arc::new(match size {
            Some(size) if size > step.rows.len() => plan::padded(step, size),
            _ => step.clone(),
        });
        if captures {
            // All ranks before one of them runs: it would wait on its device for the others, and making a graph for the device.
            let (config, step) = (config.clone(), shared.clone());
            self.ranks.run(move |rank| {
                rank.begin(&step)?;
                rank.capture(&config, numerics, &step, size)
            })?;
        }
        self.ranks.run(move |rank| {
            if !captures {
                rank.begin(&shared)?;
            }
            rank.run(&config, numerics, &shared, size)
        })?;
        let Rank { exec, sampler, .. } = self.ranks.first_mut();
        self.readbacks.start(exec, sampler, &step.samples)
    }

    /// Bytes of all tensors of rank 0.
    pub fn allocated_bytes(&self) -> u64 {
        self.ranks.first().exec.allocated_bytes()
    }

    /// Steps that ran as a CUDA graph so far.
    pub fn graph_replays(&self) -> u64 {
        self.ranks.first().graphs.replays()
    }

    /// Logits of the last step's last samples, at most 32, as logits processors left them: `[samples, vocab]`.
    pub fn logits(&self) -> Result<Vec<f32>, OpError> {
        let Rank { exec, sampler, .. } = self.ranks.first();
        let mut values = vec![0.0; sampler.logits().elements()];
        exec.read(sampler.logits(), 0, &mut values)?;
        Ok(values)
    }
}

impl Measurable for Executor {
    fn exec(&mut self) -> &mut Exec {
        &mut self.ranks.first_mut().exec
    }

    fn step(rows: &[(usize, usize)]) -> Step {
        plan::ragged(rows)
    }

    fn take_timed_ops(&mut self) -> Vec<(OpRecord, Duration)> {
        std::mem::take(&mut self.timed_ops)
    }
}

impl StepExecutor for Executor {
    type State = StateSlots;

    /// A device that computes beside the host can have the next step waiting.
    fn useful_depth(&self) -> usize {
        if self.ranks.first().exec.device() == Device::Cuda { STEPS_IN_FLIGHT } else { 1 }
    }

    fn launch(&mut self, step: &Step) -> Result<(), OpError> {
        let times_ops = self.times_ops && !self.ranks.first().exec.is_recording();
        if !times_ops {
            return self.launch_on_ranks(step);
        }
        self.ranks.first_mut().exec.start_timed_recording();
        let launched = self.launch_on_ranks(step);
        self.timed_ops = self.ranks.first_mut().exec.stop_timed_recording().unwrap_or_default();
        launched
    }

    fn finish(&mut self) -> Result<Outcome, OpError> {
        let outcome = self.readbacks.finish();
        // A rank that has failed on its device has left the others without its part.
        self.ranks.check()?;
        outcome
    }

    fn time_ops(&mut self, on: bool) {
        self.times_ops = on && self.ranks.first().exec.device() != Device::Meta;
    }

    fn take_op_times(&mut self) -> Vec<(&'static str, Duration)> {
        self.take_timed_ops().into_iter().map(|(record, time)| (record.op, time)).collect()
    }

    fn abandon(&mut self) -> Result<(), OpError> {
        self.readbacks.abandon();
        self.ranks.run(|rank| rank.exec.synchronize())
    }
}
