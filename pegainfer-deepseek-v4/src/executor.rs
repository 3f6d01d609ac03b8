//! Runs a step: the DeepSeek-V4 forward pass on every rank, written once over ops.

mod check;
mod draft;
mod draft_readbacks;
mod graphs;
mod rank;

use crate::bounds::StepBounds;
use crate::config::Config;
use crate::load_error::LoadError;
use crate::numerics::Numerics;
use crate::plan::{self, Outcome, Step};
use crate::shard::Shard;
use crate::weights::Weights;
use draft_readbacks::DraftReadbacks;
pub use graphs::GraphReplays;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::parallel::{Communicator, Ranks};
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::{GRAPH_SIZES, STEPS_IN_FLIGHT, StateSlots, StepExecutor};
use pegainfer_core::tensor::OpError;
use pegainfer_kernels::ops::deepseek_v4::plan_gemms;
use pegainfer_kernels::parallel;
use pegainfer_kernels::sources::Family;
use pegainfer_runtime::{Measurable, Readbacks, SyntheticAcceptance};
use rank::{PassKind, Rank};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tokens of the first step of a longer warm-up. It also loads the kernels of shorter steps.
const MIN_WARM_UP: usize = 256;

/// Number of first layers that contain every kind of attention and of router of the model.
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
    /// Readbacks of the tokens that rank 0 draws.
    readbacks: Readbacks,
    /// Readbacks of the drafts of rank 0; `None` if no layers that draft are loaded.
    drafting: Option<DraftReadbacks>,
    /// A forced acceptance length, for timing.
    synthetic: Option<SyntheticAcceptance>,
    /// True if the ranks are compared after each step.
    checks_ranks: bool,
    /// Copies of the steps in flight, oldest first. Empty unless their tokens are needed afterwards: for drafts, a
    /// forced acceptance, or the comparison of the ranks.
    followed: VecDeque<Step>,
    /// True if the ops of the next steps are timed.
    times_ops: bool,
    /// Op times of rank 0 in the last timed step.
    timed_ops: Vec<(OpRecord, Duration)>,
}

impl Executor {
    /// Connects the ranks, and allocates workspace and state for loaded weights, one of each per rank, rank 0 first. A
    /// single rank of several gets a communicator that loops back.
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
        let drafting = DraftReadbacks::new(&config, bounds, ranks.first().sampler.max_rows());
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

    /// Compares tokens and state of all ranks bit for bit after each step from now on; a difference is an error of the
    /// step. For development: slow. No effect with one rank.
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
        self.sample(step)?;
        self.finish()
    }

    /// Warms up a GPU for steps of up to `tokens` tokens: loads kernels and plans the GEMMs of cuBLASLt, which would
    /// otherwise delay the first requests. Runs prompts of 256, 512, … and `tokens` tokens through the first layers
    /// that contain every kind of layer. No effect on other devices.
    pub fn warm_up(&mut self, tokens: usize) -> Result<(), OpError> {
        // A step of few tokens could become a CUDA graph of the first layers.
        let is_graph = self.ranks.first().graph_shape(PassKind::Layers, &plan::uniform(1, tokens, tokens)).is_some();
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

    /// Captures the CUDA graphs of decode steps of up to `rows` rows, of steps that verify `drafts` tokens per row, and
    /// of the draft passes after them, largest first, so that no request waits for a capture. Steps with fewer drafts
    /// in every row are captured on demand.
    pub fn capture_graphs(&mut self, rows: usize, drafts: usize) -> Result<(), OpError> {
        let block = self.drafting.as_ref().and_then(|drafting| drafting.blocks).map_or(0, |blocks| blocks.shape.tokens);
        for size in GRAPH_SIZES.into_iter().rev().filter(|size| *size <= rows) {
            for row_drafts in if drafts == 0 { 0..1 } else { 0..2 } {
                let step = plan::speculative(size, row_drafts * drafts, drafts, block);
                if self.ranks.first().graph_shape(PassKind::Layers, &step).is_some() {
                    // The first run loads kernels, the second one is captured.
                    self.run(&step)?;
                    self.run(&step)?;
                }
            }
        }
        Ok(())
    }

    /// Lets steps run through the first `layers` layers only.
    fn set_layers(&mut self, layers: usize) -> Result<(), OpError> {
        self.ranks.run(move |rank| {
            rank.layers = layers;
            Ok(())
        })
    }

    /// Variant of [`run`](Self::run) that returns the record of every op of rank 0.
    pub fn record(&mut self, step: &Step) -> (Result<Outcome, OpError>, Vec<OpRecord>) {
        self.ranks.first_mut().exec.start_recording();
        let outcome = self.run(step);
        (outcome, self.ranks.first_mut().exec.stop_recording())
    }

    /// Enqueues the sampling of a step on all ranks, and the readback of its tokens.
    fn sample_on_ranks(&mut self, step: &Step) -> Result<(), OpError> {
        self.draw(PassKind::Layers, step)?;
        let Rank { exec, sampler, .. } = self.ranks.first_mut();
        self.readbacks.start(exec, sampler, &step.samples)
    }

    /// Bytes of all tensors of rank 0.
    pub fn allocated_bytes(&self) -> u64 {
        self.ranks.first().exec.allocated_bytes()
    }

    /// Logits of the last samples of the last step, up to 32 of them, after logits processors: `[samples, vocab]`.
    pub fn logits(&self) -> Result<Vec<f32>, OpError> {
        let Rank { exec, sampler, .. } = self.ranks.first();
        let mut values = vec![0.0; sampler.logits().elements()];
        exec.read(sampler.logits(), 0, &mut values)?;
        Ok(values)
    }
}

impl Measurable for Executor {
    const FAMILY: Family = Family::DeepSeekV4;

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

    /// On a GPU the next step can be launched while one runs, unless it starts with drafts of that one, or the ranks
    /// are compared in between.
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
        let launched = self.enqueue(PassKind::Layers, step);
        if times_ops && launched.is_err() {
            // The launch's own error is the one to report.
            let _ = self.ranks.first_mut().exec.stop_timed_recording();
        }
        launched?;
        if self.drafting.is_some() || self.synthetic.is_some() || self.checks_ranks {
            self.followed.push_back(step.clone());
        }
        Ok(())
    }

    fn sample(&mut self, step: &Step) -> Result<(), OpError> {
        let sampled = self.sample_on_ranks(step);
        // Since the launch; whether the next step is timed may have been decided meanwhile.
        if self.ranks.first().exec.is_timing() {
            self.timed_ops = self.ranks.first_mut().exec.stop_timed_recording().unwrap_or_default();
        }
        sampled
    }

    fn finish(&mut self) -> Result<Outcome, OpError> {
        let step = self.followed.pop_front().filter(|_| self.ranks.first().exec.device() != Device::Meta);
        let outcome = self.readbacks.finish();
        // The error of another rank explains that of rank 0, which has waited for it.
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
        let drafts = self.drafting.iter_mut().map(|drafting| &mut drafting.readbacks);
        drafts.chain([&mut self.readbacks]).for_each(Readbacks::abandon);
        self.followed.clear();
        self.ranks.run(|rank| rank.exec.synchronize())
    }
}
