//! A step's metadata on the device, at addresses that stay.

use crate::bounds::StepBounds;
use crate::plan::{PAGE_TOKENS, Step};
use pegainfer_core::exec::Exec;
use pegainfer_core::schedule::PLACEHOLDER;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::deepseek_v4::Batch;
use pegainfer_kernels::runtime::{self, StepSize};
use std::borrow::Cow;

/// The fields of a [`Step`] as tensors of u32, allocated once for the largest step.
#[derive(Debug)]
pub(crate) struct Inputs {
    /// What every model has; its block tables are page tables.
    pub common: runtime::Inputs,
    /// State slot of each row, `[rows]`.
    slots: Tensor,
}

impl Inputs {
    /// For the vocabulary's `vocab` ids.
    pub fn new(exec: &mut Exec, vocab: usize, bounds: StepBounds) -> std::io::Result<Self> {
        let StepBounds { tokens, rows, context, .. } = bounds;
        let common = runtime::Inputs::new(exec, vocab, PAGE_TOKENS, StepSize { tokens, rows, context })?;
        Ok(Self { common, slots: exec.tensor("state_slots", &[rows], DType::U32)? })
    }

    /// Takes a step over. `previous`: what the samples of the step before drew, `[samples]` u32.
    pub fn fill(&mut self, exec: &mut Exec, step: &Step, previous: &Tensor) -> Result<(), OpError> {
        self.common.fill(exec, &*resolved(exec, step, previous)?)?;
        let slots: Vec<u32> = step.state.iter().map(|segment| segment.to).collect();
        exec.fill_rows(&mut self.slots, &slots)
    }

    /// What the ops of the layers ask about the step.
    pub fn batch(&self) -> Batch<'_> {
        Batch {
            qo_indptr: &self.common.qo_indptr,
            positions: &self.common.positions,
            slots: &self.slots,
            page_tables: &self.common.block_tables,
        }
    }
}

/// The step with ids in place of its placeholder ids. Experts are found by ids, so they have to be known before the step;
/// waits for a GPU.
fn resolved<'a>(exec: &Exec, step: &'a Step, previous: &Tensor) -> Result<Cow<'a, Step>, OpError> {
    if step.tokens.iter().all(|id| id & PLACEHOLDER == 0) {
        return Ok(Cow::Borrowed(step));
    }
    let mut sampled = vec![0u32; previous.elements()];
    exec.read(previous, 0, &mut sampled)?;
    // No vocabulary has the id of a sample that does not exist.
    let drawn = |id: u32| sampled.get((id ^ PLACEHOLDER) as usize).copied().unwrap_or(u32::MAX);
    let tokens = step.tokens.iter().map(|&id| if id & PLACEHOLDER == 0 { id } else { drawn(id) }).collect();
    Ok(Cow::Owned(Step { tokens, ..step.clone() }))
}
