//! Block tables on the device, updated with the changes of each step.
//!
//! A decode step changes few entries: one row in 16 gets a block. The tables stay on the device, at one address and
//! with one stride, so CUDA graphs stay valid. The host remembers which list of blocks each row holds, and how much of
//! it. A row with the same list uploads only added blocks. A row with another list uploads all of its blocks: its
//! sequence moved up because another one ended, or it was preempted. The cost depends neither on the longest row nor on
//! the stride.
//!
//! Entries after the blocks of a row are ids of earlier steps, or 0. They are valid blocks, and no result depends on
//! them: a row has as many blocks as its context needs. Rows of padding have no context and need none.

use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::kv::BlockIds;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops;
use pegainfer_kernels::ops::RUN_FIELDS;
use std::io;
use std::ops::Range;

/// Maximum number of block ids in a run. A longer change is split into runs, which a GPU writes concurrently.
const RUN_WORDS: usize = 512;
/// Runs of one upload.
const MAX_RUNS: usize = 1 << 12;
/// Block ids of one upload.
const MAX_WORDS: usize = 1 << 15;

/// Entries of a row that the device does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Change {
    row: usize,
    entries: Range<usize>,
}

/// The block tables of the newest step.
#[derive(Debug)]
pub(super) struct BlockTables {
    /// `[rows, stride]` u32: the blocks of each row in token order.
    pub tensor: Tensor,
    /// Blocks at the start of each row of the tensor.
    held: Vec<BlockIds>,
    /// Changes of the newest step.
    changes: Vec<Change>,
    pending: PendingRuns,
}

impl BlockTables {
    /// Tables for steps of up to `rows` rows of up to `stride` blocks.
    pub fn new(exec: &mut Exec, rows: usize, stride: usize) -> io::Result<Self> {
        Ok(Self {
            tensor: exec.tensor("block_tables", &[rows, stride], DType::U32)?,
            held: vec![BlockIds::default(); rows],
            changes: Vec::new(),
            pending: PendingRuns::new(exec)?,
        })
    }

    /// Updates the tables to those of a step: on a GPU a copy and a kernel if a row has changed, otherwise nothing.
    /// Both are on the stream of the steps and start after earlier kernels have ended, so a step in flight keeps the
    /// entries that it reads.
    pub fn fill(&mut self, exec: &mut Exec, tables: &[BlockIds]) -> Result<(), OpError> {
        self.tensor.set_rows(tables.len());
        self.find_changes(tables);
        let uploaded = self.upload(exec, tables);
        if uploaded.is_err() {
            // After an error it is unknown which runs have arrived.
            self.held.fill(BlockIds::default());
        }
        debug_assert!(
            uploaded.is_err() || !matches!(exec.device(), Device::Cpu(_)) || self.holds(tables),
            "an entry was not uploaded"
        );
        uploaded
    }

    /// O(rows): no entry is looked at.
    fn find_changes(&mut self, tables: &[BlockIds]) {
        let stride = self.tensor.rows_cols().1;
        self.changes.clear();
        for (row, (held, table)) in self.held.iter_mut().zip(tables).enumerate() {
            let known = if table.shares_list(held) { held.len() } else { 0 };
            if known < table.len() {
                assert!(table.len() <= stride, "row {row} has {} blocks, at most {stride} fit", table.len());
                self.changes.push(Change { row, entries: known..table.len() });
                held.clone_from(table);
            }
        }
    }

    fn upload(&mut self, exec: &mut Exec, tables: &[BlockIds]) -> Result<(), OpError> {
        let Self { tensor, changes, pending, .. } = self;
        let stride = tensor.rows_cols().1;
        pending.clear();
        for Change { row, entries } in changes {
            for first in entries.clone().step_by(RUN_WORDS) {
                let run = first..entries.end.min(first + RUN_WORDS);
                if !pending.fits(run.len()) {
                    pending.write(exec, tensor)?;
                }
                pending.add(*row * stride + first, tables[*row].range(run));
            }
        }
        pending.write(exec, tensor)
    }

    /// True if each row of the host tensor starts with its blocks in `tables`.
    fn holds(&self, tables: &[BlockIds]) -> bool {
        let rows = self.tensor.host::<u32>().chunks_exact(self.tensor.rows_cols().1.max(1));
        rows.zip(tables).all(|(row, table)| table.iter().eq(row.iter().copied().take(table.len())))
    }
}

/// Runs that travel to the device in one upload.
#[derive(Debug)]
struct PendingRuns {
    /// Device tensors: `runs`, `[MAX_RUNS, RUN_FIELDS]`, and `words`, `[MAX_WORDS]`.
    tensors: [Tensor; 2],
    /// Runs; see [`ops::write_runs`].
    runs: Vec<[u32; RUN_FIELDS]>,
    words: Vec<u32>,
}

impl PendingRuns {
    fn new(exec: &mut Exec) -> io::Result<Self> {
        let shapes: [(&str, &[usize]); 2] = [("table_runs", &[MAX_RUNS, RUN_FIELDS]), ("table_words", &[MAX_WORDS])];
        Ok(Self { tensors: exec.adjacent(shapes, DType::U32)?, runs: Vec::new(), words: Vec::new() })
    }

    fn clear(&mut self) {
        self.runs.clear();
        self.words.clear();
    }

    /// True if a run of `words` words can be added.
    fn fits(&self, words: usize) -> bool {
        self.runs.len() < MAX_RUNS && self.words.len() + words <= MAX_WORDS
    }

    /// Adds the run of `ids` that begins at element `to` of the tables.
    fn add(&mut self, to: usize, ids: impl ExactSizeIterator<Item = u32>) {
        self.runs.push([self.words.len() as u32, to as u32, ids.len() as u32]);
        self.words.extend(ids);
    }

    /// Writes the added runs to `tables` and clears the lists. The next upload may overwrite these tensors at once,
    /// because its copy follows the kernel on the stream.
    fn write(&mut self, exec: &mut Exec, tables: &mut Tensor) -> Result<(), OpError> {
        if self.runs.is_empty() {
            return Ok(());
        }
        let [runs, words] = &mut self.tensors;
        exec.fill_adjacent([runs, words], [self.runs.as_flattened(), &self.words])?;
        ops::write_runs(exec, runs, words, tables)?;
        self.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
