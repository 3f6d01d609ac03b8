//! The logits processors of a step's samples on the device. Most steps have none.

use crate::ops::{EDIT_WORDS, PackedLogitsUpdates, SPAN_WORDS};
use pegainfer_core::exec::Exec;
use pegainfer_core::schedule::SampleRow;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// What `ops::adjust_logits` reads, for all samples of a step.
#[derive(Debug)]
pub(super) struct LogitsProcessors {
    /// `[samples, SPAN_WORDS]`.
    pub spans: Tensor,
    /// `[edits, EDIT_WORDS]`.
    pub edits: Tensor,
    /// `[masks, vocab / 32, rounded up]`.
    pub masks: Tensor,
}

impl LogitsProcessors {
    /// For steps of at most `rows` samples. There may be as many edits as tokens in the prompts, so their tensor grows
    /// with what requests ask for.
    pub fn new(exec: &mut Exec, rows: usize, vocab: usize) -> std::io::Result<Self> {
        Ok(Self {
            spans: exec.tensor("spans", &[rows, SPAN_WORDS], DType::U32)?,
            edits: exec.tensor("edits", &[1, EDIT_WORDS], DType::U32)?,
            masks: exec.tensor("masks", &[1, vocab.div_ceil(32)], DType::U32)?,
        })
    }

    /// Takes over the logits processors of a step, if it has any.
    pub fn fill(&mut self, exec: &mut Exec, samples: &[SampleRow]) -> Result<(), OpError> {
        if samples.iter().all(|row| row.logits_update.is_none()) {
            return Ok(());
        }
        let packed = PackedLogitsUpdates::new(samples.iter().map(|row| row.logits_update.as_ref()));
        exec.fill_rows(&mut self.spans, &packed.spans)?;
        fill(exec, &mut self.edits, &packed.edits)?;
        fill(exec, &mut self.masks, &packed.masks)
    }
}

/// As `Exec::fill_rows`, into a larger tensor where this one is too small.
fn fill(exec: &mut Exec, tensor: &mut Tensor, values: &[u32]) -> Result<(), OpError> {
    let (rows, cols) = (values.len() / tensor.rows_cols().1, tensor.rows_cols().1);
    if rows > tensor.max_rows() {
        // Allocation waits for a GPU; doubling keeps it rare.
        let name = tensor.name().to_owned();
        let larger = exec.tensor(&name, &[rows.next_power_of_two(), cols], DType::U32);
        *tensor = larger.map_err(|e| OpError { op: "adjust_logits", message: format!("{name}: {e}") })?;
    }
    exec.fill_rows(tensor, values)
}
