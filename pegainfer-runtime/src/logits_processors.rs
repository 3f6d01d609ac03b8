//! Logits processors of a step's samples on the device. Most steps have none.

use super::bounds::StepSize;
use pegainfer_core::exec::Exec;
use pegainfer_core::logits_processors::CountUpdate;
use pegainfer_core::schedule::SampleRow;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::{
    self, EDIT_WORDS, PENALTY_WORDS, PackedCountUpdates, PackedLogitsUpdates, PackedPenalties, SPAN_WORDS,
    UPDATE_WORDS, count_words,
};

/// Inputs of `ops::penalize` and `ops::adjust_logits` for all samples of a step, and the persistent token counts.
#[derive(Debug)]
pub(super) struct LogitsProcessors {
    /// Columns of the logits.
    vocab: usize,
    /// Token counts of each sequence with penalties, `[rows, count_words]`.
    counts: Tensor,
    /// `[rows, UPDATE_WORDS]`.
    updates: Tensor,
    /// Tokens of the updates, `[tokens]`.
    tokens: Tensor,
    /// `[samples, PENALTY_WORDS]`.
    penalties: Tensor,
    /// `[drafts]`.
    drafts: Tensor,
    /// `[samples, SPAN_WORDS]`.
    spans: Tensor,
    /// `[edits, EDIT_WORDS]`.
    edits: Tensor,
    /// `[masks, vocab / 32, rounded up]`.
    masks: Tensor,
    /// Host copy of `spans`, `edits` and `masks`.
    packed: PackedLogitsUpdates,
}

impl LogitsProcessors {
    /// Logits processors for steps of up to this size. The tensor of edits grows on demand, because their number is not
    /// limited.
    pub fn new(exec: &mut Exec, size: &StepSize, vocab: usize) -> std::io::Result<Self> {
        let mut tensor = |name: &str, shape: &[usize]| exec.tensor(name, shape, DType::U32);
        Ok(Self {
            vocab,
            counts: tensor("counts", &[size.rows, count_words(vocab)])?,
            updates: tensor("count updates", &[size.rows, UPDATE_WORDS])?,
            tokens: tensor("counted tokens", &[1])?,
            penalties: tensor("penalties", &[size.samples, PENALTY_WORDS])?,
            drafts: tensor("counted drafts", &[1])?,
            spans: tensor("spans", &[size.samples, SPAN_WORDS])?,
            edits: tensor("edits", &[1, EDIT_WORDS])?,
            masks: tensor("masks", &[1, vocab.div_ceil(32)])?,
            packed: PackedLogitsUpdates::default(),
        })
    }

    /// Uploads the logits processors of a step's samples, if any; skips unchanged ones.
    pub fn fill(&mut self, exec: &mut Exec, samples: &[SampleRow]) -> Result<(), OpError> {
        if samples.iter().any(has_penalties) {
            let penalties = samples.iter().map(|row| row.logits_update.as_ref()?.penalties.as_ref());
            let packed = PackedPenalties::new(penalties);
            exec.fill_rows(&mut self.penalties, &packed.rows)?;
            fill(exec, &mut self.drafts, &packed.drafts)?;
        }
        if samples.iter().any(has_edits) {
            let packed = PackedLogitsUpdates::new(samples.iter().map(|row| row.logits_update.as_ref()), self.vocab);
            if packed != self.packed {
                exec.fill_rows(&mut self.spans, &packed.spans)?;
                fill(exec, &mut self.edits, &packed.edits)?;
                fill(exec, &mut self.masks, &packed.masks)?;
                self.packed = packed;
            }
        }
        Ok(())
    }

    /// Counts tokens. `sampled`: the tokens of the previous step, `[samples]`.
    pub fn count(&mut self, exec: &mut Exec, added: &[CountUpdate], sampled: &Tensor) -> Result<(), OpError> {
        if added.is_empty() {
            return Ok(());
        }
        let Self { vocab, counts, updates, tokens, .. } = self;
        let packed = PackedCountUpdates::new(added);
        exec.fill_rows(updates, &packed.updates)?;
        fill(exec, tokens, &packed.tokens)?;
        ops::count_tokens(exec, counts, updates, tokens, sampled, *vocab)
    }

    /// Changes the logits of `samples`, `[samples, vocab]` f32, the first of which is the step's sample `first`.
    pub fn apply(
        &mut self,
        exec: &mut Exec,
        first: usize,
        samples: &[SampleRow],
        logits: &mut Tensor,
    ) -> Result<(), OpError> {
        let Self { counts, penalties, drafts, spans, edits, masks, .. } = self;
        if samples.iter().any(has_penalties) {
            penalties.set_range(first, samples.len());
            ops::penalize(exec, logits, counts, penalties, drafts)?;
        }
        if samples.iter().any(has_edits) {
            spans.set_range(first, samples.len());
            ops::adjust_logits(exec, logits, spans, edits, masks)?;
        }
        Ok(())
    }
}

fn has_penalties(row: &SampleRow) -> bool {
    row.logits_update.as_ref().is_some_and(|update| update.penalties.is_some())
}

fn has_edits(row: &SampleRow) -> bool {
    row.logits_update.as_ref().is_some_and(|update| !update.edits.is_empty() || update.allowed.is_some())
}

/// Like `Exec::fill_rows`, but replaces the tensor by a larger one if it is too small.
fn fill(exec: &mut Exec, tensor: &mut Tensor, values: &[u32]) -> Result<(), OpError> {
    let rows = values.len() / tensor.rows_cols().1;
    if rows > tensor.max_rows() {
        // Allocation waits for a GPU; doubling keeps it rare.
        let name = tensor.name().to_owned();
        let mut shape = tensor.shape().to_vec();
        shape[0] = rows.next_power_of_two();
        let larger = exec.tensor(&name, &shape, DType::U32);
        *tensor = larger.map_err(|e| OpError { op: "logits processors", message: format!("{name}: {e}") })?;
    }
    exec.fill_rows(tensor, values)
}
