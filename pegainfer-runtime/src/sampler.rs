//! Turns hidden states into tokens in two phases. Logits end the forward pass and may be part of its CUDA graph;
//! sampling depends on the parameters of each request.

use super::bounds::logits_rows;
use super::inputs::Inputs;
use super::model::Model;
use super::pass_kind::PassKind;
use super::vocab_padding::VocabPadding;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Communicator;
use pegainfer_core::schedule::SampleRow;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::{self, Matrix, REPORT_WORDS};
use std::ops::Range;

/// Logits by one GEMM with the output matrix. All ranks get whole logits and sample the same tokens from them.
pub(super) struct Projection<'a, M: Model> {
    pub work: &'a mut M::Workspace,
    pub weights: &'a M::Weights,
    /// The layers that ran.
    pub kind: PassKind,
    /// Output matrix, if it is not the model's.
    pub head: Option<&'a Matrix>,
    /// With several ranks: the rank's columns of the logits, `[logits_rows, vocab / ranks]` f32, and the other ranks.
    pub gather: Option<(&'a mut Tensor, &'a dyn Communicator)>,
    /// Mask of the columns that are no token ids, if the output matrix has such rows.
    pub padding: Option<&'a mut VocabPadding>,
}

impl<M: Model> Projection<'_, M> {
    /// Logits of `samples`, by their numbers: `logits`, `[samples, vocab]` f32.
    fn logits(&mut self, exec: &mut Exec, samples: Range<usize>, logits: &mut Tensor) -> Result<(), OpError> {
        let (normed, head) = match self.kind {
            PassKind::Layers => M::output(self.work, self.weights),
            PassKind::Drafts { .. } | PassKind::Blocks => M::draft_output(self.work, self.weights),
        };
        let head = self.head.unwrap_or(head);
        normed.set_range(samples.start, samples.len());
        match &mut self.gather {
            None => M::project(exec, normed, head, logits)?,
            Some((part, communicator)) => {
                part.set_rows(samples.len());
                M::project(exec, normed, head, part)?;
                communicator.all_gather(exec, part, logits)?;
            }
        }
        self.padding.as_mut().map_or(Ok(()), |padding| padding.apply(exec, logits))
    }
}

/// The last part of a step, with its activations, allocated once for the largest step.
#[derive(Debug)]
pub(super) struct Sampler {
    /// `[logits_rows, vocab]` f32.
    logits: Tensor,
    /// Tokens drawn by the samples of the last step, `[rows]` u32. At full length between two calls.
    pub sampled: Tensor,
    /// Log-probabilities of the sampled tokens, `[rows, REPORT_WORDS]` u32.
    logprobs: Tensor,
}

impl Sampler {
    /// A sampler for steps of up to `rows` samples.
    pub fn new(exec: &mut Exec, vocab: usize, rows: usize) -> std::io::Result<Self> {
        let chunk = logits_rows(exec.device()).min(rows);
        Ok(Self {
            logits: exec.tensor("logits", &[chunk, vocab], DType::F32)?,
            sampled: exec.tensor("sampled", &[rows], DType::U32)?,
            logprobs: exec.tensor("logprobs", &[rows, REPORT_WORDS], DType::U32)?,
        })
    }

    /// Maximum number of samples whose logits are computed at once.
    pub fn max_rows(&self) -> usize {
        self.logits.max_rows()
    }

    /// Logits of the last samples computed at once, after logits processors: `[n, vocab]` f32.
    pub fn logits(&self) -> &Tensor {
        &self.logits
    }

    /// Computes logits of the first of `samples` samples, as many as are computed at once. This ends the forward pass:
    /// everything up to here depends only on its shape. [`sample`](Self::sample) draws from the logits.
    pub fn project<M: Model>(
        &mut self,
        exec: &mut Exec,
        source: &mut Projection<'_, M>,
        samples: usize,
    ) -> Result<(), OpError> {
        let rows = samples.min(self.max_rows());
        if rows == 0 {
            return Ok(());
        }
        self.logits.set_rows(rows);
        source.logits(exec, 0..rows, &mut self.logits)
    }

    /// Draws the `samples` of a step and computes log-probabilities. `inputs` was filled for the step, and
    /// [`project`](Self::project) has run with the same `source`. Results stay on the device.
    pub fn sample<M: Model>(
        &mut self,
        exec: &mut Exec,
        source: &mut Projection<'_, M>,
        inputs: &mut Inputs,
        samples: &[SampleRow],
    ) -> Result<(), OpError> {
        let chunk = self.max_rows();
        let drawn = (0..samples.len()).step_by(chunk).try_for_each(|first| {
            let rows = &samples[first..samples.len().min(first + chunk)];
            self.draw(exec, source, inputs, first, rows)
        });
        // The next step may ask for any of the tokens, and a graph keeps the length.
        self.sampled.set_rows(self.sampled.max_rows());
        drawn
    }

    /// Draws the tokens of blocks of `positions` positions in `rows` rows, with logits from `source`. Samples are
    /// ordered by position, then by row; there are at most [`max_rows`](Self::max_rows). `inputs` was filled for them.
    /// Results and all logits stay on the device.
    pub fn run_blocks<M: Model>(
        &mut self,
        exec: &mut Exec,
        source: &mut Projection<'_, M>,
        inputs: &mut Inputs,
        (rows, positions): (usize, usize),
    ) -> Result<(), OpError> {
        let Self { logits, sampled, .. } = self;
        logits.set_rows(rows * positions);
        source.logits(exec, 0..rows * positions, logits)?;
        for position in 0..positions {
            let first = position * rows;
            logits.set_range(first, rows);
            let previous = position.checked_sub(1).map(|before| {
                sampled.set_range(before * rows, rows);
                &*sampled
            });
            M::add_transition(exec, (source.work, source.weights), previous, logits)?;
            sampled.set_range(first, rows);
            inputs.draws.set_range(first, rows);
            ops::sample(exec, logits, &inputs.draws, sampled)?;
        }
        logits.set_rows(rows * positions);
        sampled.set_rows(sampled.max_rows());
        Ok(())
    }

    /// Turns logits into the tokens of `samples`, from number `first` on. Does not wait for a GPU.
    fn draw<M: Model>(
        &mut self,
        exec: &mut Exec,
        source: &mut Projection<'_, M>,
        inputs: &mut Inputs,
        first: usize,
        samples: &[SampleRow],
    ) -> Result<(), OpError> {
        let Self { logits, sampled, logprobs } = self;
        let processed = |row: &SampleRow| row.logits_update.is_some();
        let range = first..first + samples.len();
        for tensor in [&mut inputs.draws, sampled, logprobs] {
            tensor.set_range(first, samples.len());
        }
        logits.set_rows(samples.len());
        if first > 0 {
            source.logits(exec, range.clone(), logits)?;
        }
        inputs.processors.apply(exec, first, samples, logits)?;
        ops::sample(exec, logits, &inputs.draws, sampled)?;
        if samples.iter().any(|row| processed(row) && row.logprobs.is_some()) {
            // Log-probabilities are of the raw logits. Computing them again is slower than a copy, and needs no second
            // buffer of their size for the few requests that want both.
            source.logits(exec, range, logits)?;
        }
        if samples.iter().any(|row| row.logprobs.is_some()) {
            ops::logprobs(exec, logits, &inputs.draws, sampled, logprobs)?;
        }
        Ok(())
    }

    /// Lends the tokens of the first `samples` samples, `[samples]` u32, and their log-probabilities, `[samples,
    /// REPORT_WORDS]` u32.
    pub(super) fn drawn<R>(&mut self, samples: usize, read: impl FnOnce([&Tensor; 2]) -> R) -> R {
        for tensor in [&mut self.sampled, &mut self.logprobs] {
            tensor.set_rows(samples);
        }
        let result = read([&self.sampled, &self.logprobs]);
        self.sampled.set_rows(self.sampled.max_rows());
        result
    }
}
