//! A ragged batch for the attention ops, with the data that a record lacks.

use super::case::{Case, Values};
use super::operands::allocate;
use super::variant::Variant;
use crate::heads::BLOCK_SIZE;
use crate::ops::{AttentionBatch, AttentionLoad};
use pegainfer_core::exec::Exec;
use pegainfer_core::kv::NO_SLOT;
use pegainfer_core::record::Operand;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Rows of unequal length: the first has one query, the last takes the rest; contexts differ as well.
struct Rows {
    queries: Vec<usize>,
    lens: Vec<u32>,
    table: Vec<u32>,
    max_blocks: usize,
    variant: Variant,
}

/// The rows on a device.
pub(super) struct Tables {
    rows: Rows,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    block_tables: Tensor,
    /// Position and slot of the last query of each row.
    pub newest: [Tensor; 2],
    /// Sizes of the filled-in rows.
    load: AttentionLoad,
}

impl Rows {
    /// Rows of `tokens` queries in all, with a block table of the shape of `tables` into `blocks` blocks.
    fn new(tokens: usize, tables: &Operand, blocks: usize, case: &Case, variant: Variant) -> Self {
        let (rows, max_blocks) = (tables.shape[0], tables.shape[1]);
        let mut queries = vec![tokens / rows; rows];
        if variant == Variant::SampledRows {
            queries = (0..rows).map(|row| usize::from(!variant.skips(row))).collect();
        } else {
            queries[0] = 1;
            queries[rows - 1] = tokens - queries[..rows - 1].iter().sum::<usize>();
        }
        let context = case.context.max(*queries.iter().max().unwrap_or(&1));
        let lens = queries.iter().enumerate().map(|(b, n)| (context - b % (context - n + 1).min(37)) as u32).collect();
        // From the last block down, so that a table is not the identity.
        let table = (0..rows * max_blocks).map(|i| (blocks - 1 - i % blocks) as u32).collect();
        Self { queries, lens, table, max_blocks, variant }
    }

    /// Context of each row. In the step that a graph is captured with, decoding rows have different, no longer
    /// contexts, and no row is padded.
    fn lens(&self, values: Values) -> Vec<u32> {
        let decodes = self.queries.iter().all(|queries| *queries <= 1);
        let len = |(row, &len): (usize, &u32)| match values {
            Values::Earlier if decodes => len.div_ceil(2),
            Values::Final if self.variant == Variant::Padded && self.variant.skips(row) => 0,
            _ => len,
        };
        self.lens.iter().enumerate().map(len).collect()
    }

    /// Positions and slots of the last query of each row.
    fn newest(&self, lens: &[u32]) -> [Vec<u32>; 2] {
        let positions = lens.iter().map(|len| len.saturating_sub(1)).collect();
        let slot = |(row, &len): (usize, &u32)| {
            let Some(position) = len.checked_sub(1) else { return NO_SLOT };
            let (block, offset) = (position as usize / BLOCK_SIZE, position % BLOCK_SIZE as u32);
            self.table[row * self.max_blocks + block] * BLOCK_SIZE as u32 + offset
        };
        [positions, lens.iter().enumerate().map(slot).collect()]
    }
}

impl Tables {
    /// Rows of `tokens` queries in all on a device, with a block table of the shape of `tables` into `blocks` blocks.
    pub fn new(
        exec: &mut Exec,
        tokens: usize,
        (tables, blocks): (&Operand, usize),
        case: &Case,
        variant: Variant,
    ) -> Result<Self, OpError> {
        let rows = Rows::new(tokens, tables, blocks, case, variant);
        let n = rows.lens.len();
        let mut ids = |name: &str, shape: &[usize]| allocate(exec, name, shape, DType::U32);
        let (qo_indptr, kv_lens) = (ids("qo_indptr", &[n + 1])?, ids("kv_lens", &[n])?);
        let block_tables = ids("block_tables", &[n, rows.max_blocks])?;
        let newest = [ids("positions", &[n])?, ids("slots", &[n])?];
        Ok(Self { rows, qo_indptr, kv_lens, block_tables, newest, load: AttentionLoad::default() })
    }

    /// Copies the rows to the device.
    pub fn fill(&mut self, exec: &mut Exec, values: Values) -> Result<(), OpError> {
        let mut end = 0;
        let ends = self.rows.queries.iter().map(|n| {
            end += *n as u32;
            end
        });
        let indptr: Vec<u32> = std::iter::once(0).chain(ends).collect();
        let lens = self.rows.lens(values);
        exec.fill_rows(&mut self.qo_indptr, &indptr)?;
        exec.fill_rows(&mut self.kv_lens, &lens)?;
        exec.fill_rows(&mut self.block_tables, &self.rows.table)?;
        for (tensor, ids) in self.newest.iter_mut().zip(self.rows.newest(&lens)) {
            exec.fill_rows(tensor, &ids)?;
        }
        let load = AttentionLoad::of(self.rows.queries.iter().copied().zip(lens.iter().map(|len| *len as usize)));
        self.load = AttentionLoad { sampled_only: self.rows.variant == Variant::SampledRows, ..load };
        Ok(())
    }

    /// True if a row attends to nothing, so that its result is undefined.
    pub fn pads(&self, row: usize) -> bool {
        self.rows.variant == Variant::Padded && self.rows.variant.skips(row)
    }

    /// The batch in the form that the ops take.
    pub fn batch(&self) -> AttentionBatch<'_> {
        let Self { qo_indptr, kv_lens, block_tables, load, .. } = self;
        AttentionBatch { qo_indptr, kv_lens, block_tables, load: *load }
    }
}
