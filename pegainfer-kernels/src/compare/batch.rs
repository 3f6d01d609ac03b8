//! A ragged batch for the attention ops: what a record does not say.

use super::{Case, allocate};
use crate::heads::BLOCK_SIZE;
use crate::ops::{AttentionBatch, AttentionLoad};
use pegainfer_core::exec::Exec;
use pegainfer_core::record::Operand;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Rows of unequal length: the first has one query, the last takes what is left over; contexts differ too.
pub(super) struct Rows {
    queries: Vec<usize>,
    lens: Vec<u32>,
    table: Vec<u32>,
    max_blocks: usize,
}

/// The same on a device.
pub(super) struct Tables {
    qo_indptr: Tensor,
    kv_lens: Tensor,
    block_tables: Tensor,
    load: AttentionLoad,
}

impl Rows {
    /// Rows of `tokens` queries in all, with a block table of the shape of `tables` into `blocks` blocks.
    pub fn new(tokens: usize, tables: &Operand, blocks: usize, case: &Case) -> Self {
        let (rows, max_blocks) = (tables.shape[0], tables.shape[1]);
        let mut queries = vec![tokens / rows; rows];
        queries[0] = 1;
        queries[rows - 1] = tokens - queries[..rows - 1].iter().sum::<usize>();
        let context = case.context.max(*queries.iter().max().unwrap_or(&1));
        let lens = queries.iter().enumerate().map(|(b, n)| (context - b % (context - n + 1).min(37)) as u32).collect();
        // From the last block down: a table is not the identity.
        let table = (0..rows * max_blocks).map(|i| (blocks - 1 - i % blocks) as u32).collect();
        Self { queries, lens, table, max_blocks }
    }

    /// Positions and slots of the last query of each row, on a device.
    pub fn newest(&self, exec: &mut Exec) -> Result<(Tensor, Tensor), OpError> {
        let positions: Vec<u32> = self.lens.iter().map(|len| len - 1).collect();
        let slot = |(row, &position): (usize, &u32)| {
            let (block, offset) = (position as usize / BLOCK_SIZE, position % BLOCK_SIZE as u32);
            self.table[row * self.max_blocks + block] * BLOCK_SIZE as u32 + offset
        };
        let slots: Vec<u32> = positions.iter().enumerate().map(slot).collect();
        Ok((ids(exec, "positions", &[slots.len()], &positions)?, ids(exec, "slots", &[slots.len()], &slots)?))
    }

    /// Copies the rows to a device.
    pub fn upload(&self, exec: &mut Exec) -> Result<Tables, OpError> {
        let mut end = 0;
        let ends = self.queries.iter().map(|n| {
            end += *n as u32;
            end
        });
        let indptr: Vec<u32> = std::iter::once(0).chain(ends).collect();
        let rows = self.lens.len();
        let load = AttentionLoad::of(self.queries.iter().zip(&self.lens).map(|(n, len)| (*n, *len as usize)));
        Ok(Tables {
            qo_indptr: ids(exec, "qo_indptr", &[rows + 1], &indptr)?,
            kv_lens: ids(exec, "kv_lens", &[rows], &self.lens)?,
            block_tables: ids(exec, "block_tables", &[rows, self.max_blocks], &self.table)?,
            load,
        })
    }
}

impl Tables {
    /// What the ops take.
    pub fn batch(&self) -> AttentionBatch<'_> {
        AttentionBatch {
            qo_indptr: &self.qo_indptr,
            kv_lens: &self.kv_lens,
            block_tables: &self.block_tables,
            load: self.load,
        }
    }
}

fn ids(exec: &mut Exec, name: &str, shape: &[usize], values: &[u32]) -> Result<Tensor, OpError> {
    let mut tensor = allocate(exec, name, shape, DType::U32)?;
    exec.fill_rows(&mut tensor, values)?;
    Ok(tensor)
}
