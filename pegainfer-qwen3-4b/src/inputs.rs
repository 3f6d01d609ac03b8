//! What a step says about its rows, on the device.

use crate::executor::StepBounds;
use crate::plan::{SampleRow, Step};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::{DRAW_WORDS, Draw};

/// The step's metadata on the device.
#[derive(Debug)]
pub(crate) struct Inputs {
    pub tokens: Tensor,
    pub positions: Tensor,
    pub slots: Tensor,
    pub qo_indptr: Tensor,
    pub kv_lens: Tensor,
    pub block_tables: Tensor,
    /// Rows that need logits, all samples of the step.
    pub sample_rows: Tensor,
    /// How to sample them, packed [`Draw`]s.
    pub draws: Tensor,
}

impl Inputs {
    pub fn new(exec: &mut Exec, bounds: StepBounds) -> std::io::Result<Self> {
        let max_blocks = bounds.context.div_ceil(pegainfer_core::kv::BLOCK_SIZE);
        let names = ["tokens", "positions", "slots", "qo_indptr", "kv_lens", "sample_rows"];
        let longest = bounds.tokens.max(bounds.rows + 1);
        let [tokens, positions, slots, qo_indptr, kv_lens, sample_rows] = exec.adjacent(names, longest, DType::U32)?;
        let block_tables = exec.tensor("block_tables", &[bounds.rows, max_blocks], DType::U32)?;
        let draws = exec.tensor("draws", &[bounds.rows, DRAW_WORDS], DType::U32)?;
        Ok(Self { tokens, positions, slots, qo_indptr, kv_lens, block_tables, sample_rows, draws })
    }

    pub fn fill(&mut self, exec: &mut Exec, step: &Step) -> Result<(), OpError> {
        let sample_rows: Vec<u32> = step.samples.iter().map(|sample| sample.token).collect();
        let draw = |sample: &SampleRow| Draw::new(&sample.params, sample.position, sample.logprobs).words();
        let draw_words: Vec<u32> = step.samples.iter().flat_map(draw).collect();
        let Self { tokens, positions, slots, qo_indptr, kv_lens, block_tables, sample_rows: rows, draws } = self;
        exec.fill_adjacent(
            [tokens, positions, slots, qo_indptr, kv_lens, rows],
            [&step.tokens, &step.positions, &step.slots, &step.qo_indptr, &step.kv_lens, &sample_rows],
        )?;
        exec.fill_rows(draws, &draw_words)?;
        // Rows of the device's table are as wide as the longest context; what lies behind a row's blocks is not read.
        block_tables.set_rows(step.rows.len());
        exec.fill_columns(block_tables, step.max_blocks, &step.block_tables)
    }
}
