//! A step's metadata on the device, at addresses that stay.

use crate::bounds::StepBounds;
use crate::plan::{PAGE_TOKENS, Step};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::deepseek_v4::RaggedBatch;
use pegainfer_runtime::StepSize;

/// The fields of a [`Step`] as tensors of u32, allocated once for the largest step.
#[derive(Debug)]
pub(crate) struct Inputs {
    /// Inputs of every model; the block tables are page tables.
    pub common: pegainfer_runtime::Inputs,
    /// State slot of each row, `[rows]`.
    slots: Tensor,
}

impl Inputs {
    /// Inputs for a vocabulary of `vocab` ids.
    pub fn new(exec: &mut Exec, vocab: usize, bounds: StepBounds) -> std::io::Result<Self> {
        let StepBounds { tokens, rows, samples, context, .. } = bounds;
        let size = StepSize { tokens, rows, samples, context };
        let common = pegainfer_runtime::Inputs::new(exec, vocab, PAGE_TOKENS, size)?;
        Ok(Self { common, slots: exec.tensor("state_slots", &[rows], DType::U32)? })
    }

    /// Takes a step over.
    pub fn fill(&mut self, exec: &mut Exec, step: &Step) -> Result<(), OpError> {
        self.common.fill(exec, step)?;
        let slots: Vec<u32> = step.state.iter().map(|segment| segment.to).collect();
        exec.fill_rows(&mut self.slots, &slots)
    }

    /// The step as the ops of the layers take it.
    pub fn batch(&self) -> RaggedBatch<'_> {
        RaggedBatch {
            qo_indptr: &self.common.qo_indptr,
            positions: &self.common.positions,
            slots: &self.slots,
            page_tables: self.common.block_tables(),
        }
    }
}
