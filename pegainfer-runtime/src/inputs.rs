//! A step's metadata on the device, at addresses that stay.

use super::block_tables::BlockTables;
use super::bounds::StepSize;
use super::logits_processors::LogitsProcessors;
use pegainfer_core::exec::Exec;
use pegainfer_core::schedule::{SampleRow, Step};
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::{AttentionBatch, AttentionLoad, DRAW_WORDS, Draw};

/// The fields of a [`Step`] as tensors of u32, allocated once for the largest step.
#[derive(Debug)]
pub struct Inputs {
    /// `[tokens]`.
    pub tokens: Tensor,
    /// Positions in the sequence, or of rotary embeddings if one number says it; see
    /// [`rope_positions`](Self::rope_positions). `[tokens]`.
    pub positions: Tensor,
    /// Time, row and column of each token, `[tokens, 3]`; allocated by the first step with tokens of an image.
    grid_positions: Option<Tensor>,
    /// True if these are the rotary positions of the step.
    uses_grid: bool,
    /// `[tokens]`.
    pub slots: Tensor,
    /// `[rows + 1]`.
    pub qo_indptr: Tensor,
    /// `[rows]`.
    pub kv_lens: Tensor,
    /// Tokens that need logits, `[samples]`.
    pub sample_rows: Tensor,
    /// Row `b` owns samples `sampled_indptr[b]..sampled_indptr[b + 1]`, `[rows + 1]`; empty if
    /// [`Step::sampled_indptr`] is `None`.
    pub sampled_indptr: Tensor,
    /// Sampling parameters and requested log-probabilities of each sample, `[samples, DRAW_WORDS]`.
    pub draws: Tensor,
    /// Block tables; see [`block_tables`](Self::block_tables).
    tables: BlockTables,
    /// Longest context of the engine.
    context: usize,
    /// True if launches are kept; see [`keep_launches`](Self::keep_launches).
    keeps_launches: bool,
    /// Logits processors of the samples.
    pub(super) processors: LogitsProcessors,
}

impl Inputs {
    /// Inputs for steps of up to this size with KV blocks of `block_tokens` tokens and `vocab` token ids.
    pub fn new(exec: &mut Exec, vocab: usize, block_tokens: usize, size: StepSize) -> std::io::Result<Self> {
        let processors = LogitsProcessors::new(exec, &size, vocab)?;
        let StepSize { tokens, rows, samples, context } = size;
        let shapes: [(&str, &[usize]); 8] = [
            ("tokens", &[tokens]),
            ("positions", &[tokens]),
            ("slots", &[tokens]),
            ("qo_indptr", &[rows + 1]),
            ("kv_lens", &[rows]),
            ("sample_rows", &[samples]),
            ("sampled_indptr", &[rows + 1]),
            ("draws", &[samples, DRAW_WORDS]),
        ];
        let [tokens, positions, slots, qo_indptr, kv_lens, sample_rows, sampled_indptr, draws] =
            exec.adjacent(shapes, DType::U32)?;
        let tables = BlockTables::new(exec, rows, context.div_ceil(block_tokens))?;
        Ok(Self {
            tokens,
            positions,
            grid_positions: None,
            uses_grid: false,
            slots,
            qo_indptr,
            kv_lens,
            sample_rows,
            sampled_indptr,
            draws,
            tables,
            context,
            keeps_launches: false,
            processors,
        })
    }

    /// Sets whether a CUDA graph keeps the launches of the next step: then they fit every context of the engine.
    pub fn keep_launches(&mut self, kept: bool) {
        self.keeps_launches = kept;
    }

    /// Block ids of each row, `[rows, stride]`; the stride is that of the longest possible context.
    pub fn block_tables(&self) -> &Tensor {
        &self.tables.tensor
    }

    /// Uploads the inputs of a step: on a GPU one copy, after the changes of its block tables, if any. Inputs that an
    /// earlier step still reads stay intact, because the copies are ordered after it.
    pub fn fill<M: Clone + Default>(&mut self, exec: &mut Exec, step: &Step<M>) -> Result<(), OpError> {
        // Before the copy: no kernel of the step starts until the copy has ended, so all may read the tables early.
        self.tables.fill(exec, &step.block_tables)?;
        let rows: Vec<u32> = step.samples.iter().map(|row| row.token).collect();
        let sampled = step.sampled_indptr().unwrap_or_default();
        let draw = |row: &SampleRow| Draw::new(&row.params, row.position, row.logprobs).words();
        let words: Vec<u32> = step.samples.iter().flat_map(draw).collect();
        self.fill_grid_positions(exec, step)?;
        // Without tokens of images, all three are the same.
        let single: Vec<u32> = step.rope_positions.iter().map(|[time, ..]| *time).collect();
        let at = if single.is_empty() { &step.positions } else { &single };
        let Self { tokens, positions, slots, qo_indptr, kv_lens, sample_rows, sampled_indptr, draws, .. } = self;
        exec.fill_adjacent(
            [tokens, positions, slots, qo_indptr, kv_lens, sample_rows, sampled_indptr, draws],
            [&step.tokens, at, &step.slots, &step.qo_indptr, &step.kv_lens, &rows, &sampled, &words],
        )
    }

    /// Uploads rotary positions that differ in time, row and column.
    fn fill_grid_positions<M>(&mut self, exec: &mut Exec, step: &Step<M>) -> Result<(), OpError> {
        self.uses_grid = step.rope_positions.iter().any(|[time, row, column]| time != row || time != column);
        if !self.uses_grid {
            return Ok(());
        }
        if self.grid_positions.is_none() {
            let made = exec.tensor("grid_positions", &[self.tokens.max_rows(), 3], DType::U32);
            let made = made.map_err(|e| OpError { op: "inputs", message: format!("no memory for positions: {e}") })?;
            self.grid_positions = Some(made);
        }
        let Some(tensor) = &mut self.grid_positions else { return Ok(()) };
        exec.fill_rows(tensor, step.rope_positions.as_flattened())
    }

    /// Rotary positions of the tokens, `[tokens]`, or `[tokens, 3]` in a step with tokens of images: time, row, column.
    pub fn rope_positions(&self) -> &Tensor {
        self.grid_positions.as_ref().filter(|_| self.uses_grid).unwrap_or(&self.positions)
    }

    /// Uploads the logits processors of a step's samples, if any, before they are drawn, and counts tokens. `sampled`:
    /// the tokens of the previous step, `[samples]` u32.
    pub fn fill_processors<M>(&mut self, exec: &mut Exec, step: &Step<M>, sampled: &Tensor) -> Result<(), OpError> {
        self.processors.fill(exec, &step.samples)?;
        self.processors.count(exec, &step.counts, sampled)
    }

    /// Attention inputs of `step`, which this was filled with.
    pub fn attention<M: Clone + Default>(&self, step: &Step<M>) -> AttentionBatch<'_> {
        let queries = step.qo_indptr.windows(2).map(|ends| (ends[1] - ends[0]) as usize);
        let rows = queries.zip(&step.kv_lens).map(|(queries, context)| (queries, *context as usize));
        let load = AttentionLoad::of(rows);
        let longest = if self.keeps_launches { self.context } else { load.longest };
        self.batch(&self.qo_indptr, AttentionLoad { longest, ..load })
    }

    fn batch<'a>(&'a self, qo_indptr: &'a Tensor, load: AttentionLoad) -> AttentionBatch<'a> {
        AttentionBatch { qo_indptr, kv_lens: &self.kv_lens, block_tables: self.block_tables(), load }
    }

    /// True if each sampled token of the step is the last one of its row.
    pub fn samples_end_rows(&self) -> bool {
        self.sampled_indptr.elements() > 0
    }

    /// Variant of [`attention`](Self::attention) for the sampled tokens alone, after the keys and values of all tokens.
    /// Requires [`samples_end_rows`](Self::samples_end_rows).
    pub fn sampled_attention<M>(&self, step: &Step<M>) -> AttentionBatch<'_> {
        let rows = step.samples.iter().map(|sample| (1, step.positions[sample.token as usize] as usize + 1));
        self.batch(&self.sampled_indptr, AttentionLoad { sampled_only: true, ..AttentionLoad::of(rows) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_core::isa::Isa;
    use pegainfer_core::kv::BlockIds;
    use pegainfer_kernels::ops::BLOCK_SIZE;

    #[test]
    fn block_tables_are_those_of_the_step_whether_they_changed_or_not() {
        let mut exec = Exec::cpu(Isa::best(), Some(1)).unwrap();
        let mut inputs =
            Inputs::new(&mut exec, 64, BLOCK_SIZE, StepSize { tokens: 8, rows: 4, samples: 4, context: 100 }).unwrap();
        let held = |inputs: &Inputs, step: &Step| {
            let (rows, stride) = inputs.block_tables().rows_cols();
            assert_eq!((rows, stride), (step.rows.len(), 100usize.div_ceil(BLOCK_SIZE)));
            let ids = inputs.block_tables().host::<u32>().chunks_exact(stride);
            ids.map(|row| row.iter().copied().take(step.max_blocks()).collect()).collect::<Vec<BlockIds>>()
        };
        let mut other = Step::uniform(BLOCK_SIZE, 2, 1, 40);
        other.block_tables[1] = [3, 9, 5].into_iter().collect();
        let longer = Step::uniform(BLOCK_SIZE, 2, 1, 41);
        for step in [
            Step::uniform(BLOCK_SIZE, 2, 1, 40),
            longer,
            other,
            Step::uniform(BLOCK_SIZE, 1, 1, 90),
            Step::uniform(BLOCK_SIZE, 2, 1, 40),
        ] {
            inputs.fill(&mut exec, &step).unwrap();
            assert_eq!(held(&inputs, &step), step.block_tables);
            assert_eq!(inputs.kv_lens.host::<u32>(), step.kv_lens);
        }
    }

    #[test]
    fn attention_knows_the_rows_that_decode_from_the_prompts() {
        let mut exec = Exec::cpu(Isa::best(), Some(1)).unwrap();
        let inputs =
            Inputs::new(&mut exec, 64, BLOCK_SIZE, StepSize { tokens: 36, rows: 3, samples: 3, context: 100 }).unwrap();
        let step = Step::<()> {
            qo_indptr: vec![0, 1, 4, 36],
            kv_lens: vec![40, 9, 50],
            ..Step::uniform(BLOCK_SIZE, 3, 1, 50)
        };
        assert_eq!(inputs.attention(&step).load, AttentionLoad::of([(1, 40), (3, 9), (32, 50)]));
    }

    #[test]
    fn attention_of_samples_is_one_query_of_a_row() {
        let mut exec = Exec::cpu(Isa::best(), Some(1)).unwrap();
        let mut inputs =
            Inputs::new(&mut exec, 64, BLOCK_SIZE, StepSize { tokens: 36, rows: 3, samples: 3, context: 100 }).unwrap();
        let mut step = Step::<()>::uniform(BLOCK_SIZE, 3, 4, 50);
        step.samples.remove(1);
        inputs.fill(&mut exec, &step).unwrap();
        assert!(inputs.samples_end_rows());
        let batch = inputs.sampled_attention(&step);
        assert_eq!(batch.qo_indptr.host::<u32>(), [0, 1, 1, 2]);
        assert_eq!(batch.load, AttentionLoad { sampled_only: true, ..AttentionLoad::of([(1, 50), (1, 50)]) });
        step.samples[0].token -= 1;
        inputs.fill(&mut exec, &step).unwrap();
        assert!(!inputs.samples_end_rows(), "a prompt logprob");
    }
}
