//! Logits, tokens and log-probabilities of the rows that want them.

use super::Pass;
use crate::plan::SampleRow;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::{self, EDIT_WORDS, PackedAdjustments, SPAN_WORDS};

impl Pass<'_> {
    /// A chunk of rows at a time. Every rank draws the same tokens, from the same logits.
    pub(super) fn sample(&mut self) -> Result<(), OpError> {
        let (samples, chunk) = (self.step.samples.len(), self.work.last.max_rows());
        for first in (0..samples).step_by(chunk) {
            self.draw(first, chunk.min(samples - first))?;
        }
        for tensor in [&mut self.work.sampled, &mut self.work.logprobs] {
            tensor.set_rows(samples);
        }
        Ok(())
    }

    /// From `streams` to what `rows` samples from `first` on draw.
    fn draw(&mut self, first: usize, rows: usize) -> Result<(), OpError> {
        let samples = &self.step.samples[first..][..rows];
        let Self { inputs, work, .. } = self;
        for tensor in [&mut inputs.sample_rows, &mut inputs.draws, &mut work.sampled, &mut work.logprobs] {
            tensor.set_range(first, rows);
        }
        self.logits(rows)?;
        let adjusted = |row: &SampleRow| row.adjustment.is_some();
        if samples.iter().any(adjusted) {
            adjust(self.exec, samples, &mut self.work.logits)?;
        }
        ops::sample(self.exec, &self.work.logits, &self.inputs.draws, &mut self.work.sampled)?;
        if samples.iter().any(|row| adjusted(row) && row.logprobs.is_some()) {
            // Reports are of the raw logits.
            self.logits(rows)?;
        }
        let Self { exec, inputs, work, .. } = self;
        match samples.iter().any(|row| row.logprobs.is_some()) {
            true => ops::logprobs(exec, &work.logits, &inputs.draws, &work.sampled, &mut work.logprobs),
            false => Ok(()),
        }
    }

    /// The logits of the rows in `sample_rows`, whole on every rank.
    fn logits(&mut self, rows: usize) -> Result<(), OpError> {
        let (spec, eps, shared) = (self.hyper_spec(), self.config.rms_norm_eps, self.is_shared());
        let Self { exec, weights, inputs, work, .. } = self;
        let tensors = [&mut work.last_streams, &mut work.last, &mut work.last_normed];
        tensors.into_iter().chain([&mut work.logits_part, &mut work.logits]).for_each(|tensor| tensor.set_rows(rows));
        ops::deepseek_v4::pick_rows(exec, &work.streams, &inputs.sample_rows, &mut work.last_streams)?;
        ops::deepseek_v4::hyper_head(exec, &work.last_streams, &weights.head_hyper, spec, &mut work.last)?;
        ops::deepseek_v4::norm(exec, &work.last, &weights.norm, eps, &mut work.last_normed)?;
        if !shared {
            return ops::deepseek_v4::matmul(exec, &work.last_normed, &weights.head, false, &mut work.logits);
        }
        ops::deepseek_v4::matmul(exec, &work.last_normed, &weights.head, false, &mut work.logits_part)?;
        self.communicator.all_gather(exec, &work.logits_part, &mut work.logits)
    }
}

/// Applies the rules of `samples`. Few requests have any, so their tensors are made when they are needed.
fn adjust(exec: &mut Exec, samples: &[SampleRow], logits: &mut Tensor) -> Result<(), OpError> {
    let packed = PackedAdjustments::new(samples.iter().map(|row| row.adjustment.as_ref()));
    let mut tensor = |name: &str, words: &[u32], width: usize| {
        let failed = |e: std::io::Error| OpError { op: "adjust_logits", message: format!("{name}: {e}") };
        // A step without masks has none, and no tensor has room for nothing.
        let mut tensor = exec.tensor(name, &[(words.len() / width).max(1), width], DType::U32).map_err(failed)?;
        exec.fill_rows(&mut tensor, words).map(|()| tensor)
    };
    let spans = tensor("spans", &packed.spans, SPAN_WORDS)?;
    let edits = tensor("edits", &packed.edits, EDIT_WORDS)?;
    let masks = tensor("masks", &packed.masks, logits.rows_cols().1.div_ceil(32))?;
    ops::adjust_logits(exec, logits, &spans, &edits, &masks)
}
