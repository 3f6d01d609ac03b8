//! A step's metadata on the device, at addresses that stay.

use crate::executor::StepBounds;
use crate::plan::{PAGE_TOKENS, SampleRow, Step};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::deepseek_v4::Batch;
use pegainfer_kernels::ops::{DRAW_WORDS, Draw};

/// The fields of a [`Step`] as tensors of u32, allocated once for the largest step.
#[derive(Debug)]
pub(crate) struct Inputs {
    pub tokens: Tensor,
    pub positions: Tensor,
    pub qo_indptr: Tensor,
    pub slots: Tensor,
    /// Tokens that need logits, `[samples]`.
    pub sample_rows: Tensor,
    /// How each of them is sampled and reported, `[samples, DRAW_WORDS]`.
    pub draws: Tensor,
    /// `[rows, max_pages]`, as wide as the longest context.
    pub page_tables: Tensor,
}

impl Inputs {
    pub fn new(exec: &mut Exec, bounds: StepBounds) -> std::io::Result<Self> {
        let StepBounds { tokens, rows, context, .. } = bounds;
        let mut tensor = |name: &str, shape: &[usize]| exec.tensor(name, shape, DType::U32);
        Ok(Self {
            tokens: tensor("tokens", &[tokens])?,
            positions: tensor("positions", &[tokens])?,
            qo_indptr: tensor("qo_indptr", &[rows + 1])?,
            slots: tensor("slots", &[rows])?,
            sample_rows: tensor("sample_rows", &[tokens])?,
            draws: tensor("draws", &[tokens, DRAW_WORDS])?,
            page_tables: tensor("page_tables", &[rows, context.div_ceil(PAGE_TOKENS)])?,
        })
    }

    /// Takes a step over.
    pub fn fill(&mut self, exec: &mut Exec, step: &Step) -> Result<(), OpError> {
        let rows: Vec<u32> = step.samples.iter().map(|row| row.token).collect();
        let draw = |row: &SampleRow| Draw::new(&row.params, row.position, row.logprobs).words();
        let words: Vec<u32> = step.samples.iter().flat_map(draw).collect();
        exec.fill_rows(&mut self.tokens, &step.tokens)?;
        exec.fill_rows(&mut self.positions, &step.positions)?;
        exec.fill_rows(&mut self.qo_indptr, &step.qo_indptr)?;
        exec.fill_rows(&mut self.slots, &step.slots)?;
        exec.fill_rows(&mut self.sample_rows, &rows)?;
        exec.fill_rows(&mut self.draws, &words)?;
        // What lies behind a row's pages is not read.
        self.page_tables.set_rows(step.rows.len());
        exec.fill_columns(&mut self.page_tables, step.max_pages, &step.page_tables)
    }

    /// What the ops of the layers ask about the step.
    pub fn batch(&self) -> Batch<'_> {
        Batch {
            qo_indptr: &self.qo_indptr,
            positions: &self.positions,
            slots: &self.slots,
            page_tables: &self.page_tables,
        }
    }
}
