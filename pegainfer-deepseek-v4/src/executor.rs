//! Runs a step: the DeepSeek-V4 forward pass on every rank, written once over ops.

mod check;
mod rank;

use crate::bounds::StepBounds;
use crate::config::Config;
use crate::load_error::LoadError;
use crate::numerics::Numerics;
use crate::plan::{self, NO_STATE, Outcome, PAGE_TOKENS, Segment, Step};
use crate::shard::Shard;
use crate::weights::Weights;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::parallel::{Communicator, Ranks};
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::{STEPS_IN_FLIGHT, StateSlots, StepExecutor};
use pegainfer_core::tensor::OpError;
use pegainfer_kernels::ops::deepseek_v4::plan_gemms;
use pegainfer_kernels::parallel;
use pegainfer_kernels::runtime::drafting::{self, DraftRow, Drafting};
use pegainfer_kernels::runtime::{Measurable, Readbacks, SyntheticAcceptance};
use rank::{GraphKey, Part, Rank};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tokens of the first step of a warm-up for more tokens. Steps of up to 128 tokens need none: their GEMMs run without cuBLASLt.
const MIN_WARM_UP: usize = 256;

/// Number of the first layers in which every kind of attention and of router of the model occurs.
fn distinct_layers(config: &Config) -> usize {
    let kind = |i: usize| (config.layers[i], i < config.hash_layers);
    let is_new = |i: &usize| !(0..*i).any(|before| kind(before) == kind(*i));
    (0..config.layers.len()).rfind(is_new).map_or(0, |i| i + 1)
}

/// Passes that ran as CUDA graphs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GraphReplays {
    /// Steps whose rows have one token each.
    pub decode: u64,
    /// Steps whose rows have several tokens: they verify drafts.
    pub verify: u64,
    /// Passes of the layer that drafts over the tokens of a step.
    pub first_drafts: u64,
    /// Passes of that layer behind its own drafts.
    pub next_drafts: u64,
}

/// The model on all of its ranks.
#[derive(Debug)]
pub struct Executor {
    config: Arc<Config>,
    numerics: Numerics,
    ranks: Ranks<Rank>,
    /// Readbacks of the tokens that rank 0 draws.
    readbacks: Readbacks,
    /// Readbacks of the drafts of rank 0; `None` if the layer that drafts is not loaded.
    drafting: Option<Drafting>,
    /// A forced acceptance length, for timing.
    synthetic: Option<SyntheticAcceptance>,
    /// Whether to compare the ranks after each step.
    checks_ranks: bool,
    /// Copies of the steps in flight, oldest first. Empty unless something follows a step once its tokens are known: drafts, a forced
    /// acceptance, or the comparison of the ranks.
    followed: VecDeque<Step>,
    /// Whether to time the ops of the steps that are launched from now on.
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
        let readbacks = Readbacks::new(&mut ranks.first_mut().exec, bounds.samples)?;
        let drafting = config.loads_drafts.then(|| Drafting::new(bounds.rows));
        Ok(Self {
            config: Arc::new(config),
            numerics,
            ranks,
            readbacks,
            drafting,
            synthetic: None,
            checks_ranks: false,
            followed: VecDeque::new(),
            times_ops: false,
            timed_ops: Vec::new(),
        })
    }

    /// Forces the acceptance length of drafts, for timing; see
    /// [`Speculation::synthetic_acceptance_length`](pegainfer_core::schedule::speculation::Speculation).
    pub fn set_synthetic_acceptance(&mut self, synthetic: Option<SyntheticAcceptance>) {
        self.synthetic = synthetic;
    }

    /// From now on, compares tokens and state of all ranks after each step, bit for bit; a difference is an error of the step. For
    /// development: slow. No effect with one rank.
    pub fn check_ranks(&mut self) {
        self.checks_ranks = self.ranks.count() > 1;
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

    /// Warm-up of a GPU for steps of up to `tokens` tokens: loads kernels and plans the GEMMs of cuBLASLt, for which the first requests
    /// would wait. Runs prompts of 256, 512, … and `tokens` tokens through the first layers in which every kind of layer occurs. On other
    /// devices there is nothing to do.
    pub fn warm_up(&mut self, tokens: usize) -> Result<(), OpError> {
        // A step of few tokens could become a CUDA graph of the first layers.
        let is_graph = self.ranks.first().graph_shape(&plan::uniform(1, tokens, tokens)).is_some();
        if self.ranks.first().exec.device() != Device::Cuda || is_graph {
            return Ok(());
        }
        self.set_layers(distinct_layers(&self.config))?;
        let sizes = std::iter::successors(Some(MIN_WARM_UP), |tokens| Some(2 * tokens)).take_while(|n| *n < tokens);
        let ran = sizes.chain([tokens]).try_for_each(|n| self.run(&plan::uniform(1, n, n)).map(drop));
        self.set_layers(self.config.layers.len())?;
        ran?;
        self.ranks.run(move |rank| rank.exec.install(|exec| plan_gemms(exec, tokens)))
    }

    /// Lets steps run through the first `layers` layers only.
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

    /// Enqueues a pass through `part` over `step` on all ranks, as a CUDA graph if there is one of its shape.
    fn enqueue(&mut self, part: Part, step: &Step) -> Result<(), OpError> {
        let (config, numerics, rank) = (self.config.clone(), self.numerics, self.ranks.first());
        let key = rank.graph_shape(step).map(|shape| GraphKey { part, shape });
        let captures = rank.graphs.captures(key);
        let step = Arc::new(key.map_or_else(|| step.clone(), |key| plan::padded(step, key.shape)));
        if captures {
            // All ranks before one of them runs: it would wait on its device for the others, and making a graph for the device.
            let (config, step) = (config.clone(), step.clone());
            self.ranks.run(move |rank| {
                rank.begin(part, &step)?;
                rank.on_device((&config, numerics, part), &step, |graphs, launches| graphs.capture(key, launches))
            })?;
        }
        self.ranks.run(move |rank| {
            if !captures {
                rank.begin(part, &step)?;
            }
            rank.on_device((&config, numerics, part), &step, |graphs, launches| graphs.run(key, launches))
        })
    }

    /// Enqueues a step on all ranks, and the readback of its tokens.
    fn launch_on_ranks(&mut self, step: &Step) -> Result<(), OpError> {
        self.enqueue(Part::Layers, step)?;
        let Rank { exec, sampler, .. } = self.ranks.first_mut();
        self.readbacks.start(exec, sampler, &step.samples)
    }

    /// Enqueues the passes of the layer that drafts behind `step`, whose samples drew `drawn`, and waits for the drafts of each row. A
    /// pass finds the drafts of the one before on the device. Empty if that layer is not loaded.
    fn draft(&mut self, step: &Step, drawn: &[u32]) -> Result<Vec<Vec<u32>>, OpError> {
        if self.drafting.is_none() {
            return Ok(Vec::new());
        }
        let (mut pass, rows) = drafting::first_pass(step, drawn);
        let passes = drafting::passes(&rows);
        for i in 0..passes.max(1) {
            if i > 0 {
                pass = next_pass(step, &rows, i);
            }
            self.enqueue(Part::Draft { again: i > 0 }, &pass)?;
            let Rank { exec, sampler, .. } = self.ranks.first_mut();
            if let Some(drafting) = self.drafting.as_mut().filter(|_| !pass.samples.is_empty()) {
                drafting.start_readback(exec, sampler, &pass.samples, i)?;
            }
        }
        self.drafting.as_mut().map_or(Ok(Vec::new()), |drafting| drafting.finish(step.rows.len(), &rows, passes))
    }

    /// Bytes of all tensors of rank 0.
    pub fn allocated_bytes(&self) -> u64 {
        self.ranks.first().exec.allocated_bytes()
    }

    /// Passes that ran as a CUDA graph so far.
    pub fn graph_replays(&self) -> GraphReplays {
        let graphs = &self.ranks.first().graphs;
        let of = |part: Part| graphs.replays_of(|key| key.part == part);
        let is_decode = |key: &GraphKey| key.part == Part::Layers && key.shape.tokens == key.shape.rows;
        let decode = graphs.replays_of(is_decode);
        GraphReplays {
            decode,
            verify: of(Part::Layers) - decode,
            first_drafts: of(Part::Draft { again: false }),
            next_drafts: of(Part::Draft { again: true }),
        }
    }

    /// From now on pads steps of up to `rows` rows as for CUDA graphs, but runs them launch by launch: for tests on devices without graphs.
    pub fn only_pad(&mut self, rows: usize) -> Result<(), OpError> {
        self.ranks.run(move |rank| {
            rank.only_pad(rows);
            Ok(())
        })
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

    /// On a GPU the next step can be launched while one runs, unless it begins with drafts of that one, or the ranks are compared between
    /// the two.
    fn useful_depth(&self) -> usize {
        let waits = self.drafting.is_some() || self.checks_ranks;
        let overlaps = self.ranks.first().exec.device() == Device::Cuda && !waits;
        if overlaps { STEPS_IN_FLIGHT } else { 1 }
    }

    fn launch(&mut self, step: &Step) -> Result<(), OpError> {
        let times_ops = self.times_ops && !self.ranks.first().exec.is_recording();
        if times_ops {
            self.ranks.first_mut().exec.start_timed_recording();
        }
        let launched = self.launch_on_ranks(step);
        if times_ops {
            self.timed_ops = self.ranks.first_mut().exec.stop_timed_recording().unwrap_or_default();
        }
        launched?;
        if self.drafting.is_some() || self.synthetic.is_some() || self.checks_ranks {
            self.followed.push_back(step.clone());
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<Outcome, OpError> {
        let step = self.followed.pop_front().filter(|_| self.ranks.first().exec.device() != Device::Meta);
        let outcome = self.readbacks.finish();
        // An error of another rank explains that of rank 0, which has waited for it.
        self.ranks.check()?;
        let mut outcome = outcome?;
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

    fn time_ops(&mut self, on: bool) {
        self.times_ops = on && self.ranks.first().exec.device() != Device::Meta;
    }

    fn take_op_times(&mut self) -> Vec<(&'static str, Duration)> {
        self.take_timed_ops().into_iter().map(|(record, time)| (record.op, time)).collect()
    }

    fn abandon(&mut self) -> Result<(), OpError> {
        self.readbacks.abandon();
        self.followed.clear();
        self.ranks.run(|rank| rank.exec.synchronize())
    }
}

/// Pass `pass`, from 1 on, of the layer that drafts behind `step`, see [`drafting::next_pass`], with the state slots of its rows. A row
/// that wants no more drafts has none.
fn next_pass(step: &Step, rows: &[DraftRow], pass: usize) -> Step {
    let mut next = drafting::next_pass(step, rows, pass, PAGE_TOKENS);
    let segment = |(row, first): (&DraftRow, u32)| {
        let slot = if pass < row.count { step.state[row.row].to } else { NO_STATE };
        Segment { first, end: first + 1, from: slot, to: slot }
    };
    next.state = rows.iter().zip(0..).map(segment).collect();
    next
}
