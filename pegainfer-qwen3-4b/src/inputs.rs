//! A step's metadata on the device, at addresses that stay.

use crate::adjustments::Adjustments;
use crate::executor::StepBounds;
use crate::plan::{SampleRow, Step};
use pegainfer_core::exec::Exec;
use pegainfer_core::kv::BLOCK_SIZE;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::{DRAW_WORDS, Draw};

/// The fields of a [`Step`] as tensors of u32, allocated once for the largest step.
#[derive(Debug)]
pub(crate) struct Inputs {
    pub tokens: Tensor,
    pub positions: Tensor,
    pub slots: Tensor,
    pub qo_indptr: Tensor,
    pub kv_lens: Tensor,
    /// Tokens that need logits, `[samples]`.
    pub sample_rows: Tensor,
    /// How each of them is sampled and reported, `[samples, DRAW_WORDS]`.
    pub draws: Tensor,
    /// `[rows, max_blocks]`, as wide as the longest context.
    pub block_tables: Tensor,
    /// Rules of the samples.
    pub adjustments: Adjustments,
}

impl Inputs {
    pub fn new(exec: &mut Exec, vocab: usize, bounds: StepBounds) -> std::io::Result<Self> {
        let StepBounds { tokens, rows, context, .. } = bounds;
        let shapes: [(&str, &[usize]); 7] = [
            ("tokens", &[tokens]),
            ("positions", &[tokens]),
            ("slots", &[tokens]),
            ("qo_indptr", &[rows + 1]),
            ("kv_lens", &[rows]),
            ("sample_rows", &[rows]),
            ("draws", &[rows, DRAW_WORDS]),
        ];
        let [tokens, positions, slots, qo_indptr, kv_lens, sample_rows, draws] = exec.adjacent(shapes, DType::U32)?;
        let block_tables = exec.tensor("block_tables", &[rows, context.div_ceil(BLOCK_SIZE)], DType::U32)?;
        let adjustments = Adjustments::new(exec, bounds.rows, vocab)?;
        Ok(Self { tokens, positions, slots, qo_indptr, kv_lens, sample_rows, draws, block_tables, adjustments })
    }

    /// Takes a step over: two copies on a GPU, and up to three for rules. What an earlier step still reads is not
    /// disturbed, because they come behind it.
    pub fn fill(&mut self, exec: &mut Exec, step: &Step) -> Result<(), OpError> {
        let rows: Vec<u32> = step.samples.iter().map(|row| row.token).collect();
        let draw = |row: &SampleRow| Draw::new(&row.params, row.position, row.logprobs).words();
        let words: Vec<u32> = step.samples.iter().flat_map(draw).collect();
        self.adjustments.fill(exec, &step.samples)?;
        let Self { tokens, positions, slots, qo_indptr, kv_lens, sample_rows, draws, block_tables, .. } = self;
        exec.fill_adjacent(
            [tokens, positions, slots, qo_indptr, kv_lens, sample_rows, draws],
            [&step.tokens, &step.positions, &step.slots, &step.qo_indptr, &step.kv_lens, &rows, &words],
        )?;
        // What lies behind a row's blocks is not read.
        block_tables.set_rows(step.rows.len());
        exec.fill_columns(block_tables, step.max_blocks, &step.block_tables)
    }
}
