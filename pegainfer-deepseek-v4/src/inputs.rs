//! A step's metadata on the device, as the ops of the layers take it.

use pegainfer_core::tensor::Tensor;
use pegainfer_kernels::ops::deepseek_v4::RaggedBatch;

/// Inputs of every model, whose block tables are page tables, and the state slots.
pub(crate) struct Inputs<'a> {
    pub common: &'a mut pegainfer_runtime::Inputs,
    /// State slot of each row, `[rows]`.
    pub slots: &'a Tensor,
}

impl Inputs<'_> {
    /// The step as the ops of the layers take it.
    pub fn batch(&self) -> RaggedBatch<'_> {
        RaggedBatch {
            qo_indptr: &self.common.qo_indptr,
            positions: &self.common.positions,
            slots: self.slots,
            page_tables: self.common.block_tables(),
        }
    }
}
