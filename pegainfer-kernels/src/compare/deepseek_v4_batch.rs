//! A ragged batch for the ops of DeepSeek-V4, with the data that a record lacks.

use super::case::{Case, Values};
use super::variant::Variant;
use crate::ops::deepseek_v4::{PAGE_TOKENS, RaggedBatch};
use pegainfer_core::exec::Exec;
use pegainfer_core::kv::NO_SLOT;
use pegainfer_core::tensor::{OpError, Tensor};

/// The operands of a [`RaggedBatch`], in its order.
pub(super) struct Operands<'a>([&'a Tensor; 4]);

impl<'a> TryFrom<&'a [Tensor]> for Operands<'a> {
    type Error = ();

    fn try_from(operands: &'a [Tensor]) -> Result<Self, ()> {
        let [qo_indptr, positions, slots, page_tables] = operands else { return Err(()) };
        Ok(Self([qo_indptr, positions, slots, page_tables]))
    }
}

impl<'a> Operands<'a> {
    /// The batch in the form that the ops take.
    pub fn batch(&self) -> RaggedBatch<'a> {
        let [qo_indptr, positions, slots, page_tables] = self.0;
        RaggedBatch { qo_indptr, positions, slots, page_tables }
    }
}

/// Values of a batch: rows of unequal length, in slots and pages from the last one down. The first row has one token,
/// the last takes the rest. Contexts differ, so that windows, rings and entries start and end anywhere.
pub(super) struct Rows {
    indptr: Vec<u32>,
    pub positions: Vec<u32>,
    slots: Vec<u32>,
    tables: Vec<u32>,
}

impl Rows {
    /// Rows for `operands`, with a cache of `pages` pages, if the op has one. Rows of padding have no slot, and invalid
    /// positions and pages. `None` if a row's context is longer than its table, or the cache has too few pages.
    pub fn new(
        operands: &[Tensor],
        cache: Option<usize>,
        case: &Case,
        (variant, values): (Variant, Values),
    ) -> Option<Self> {
        let [_, positions, _, tables] = operands else { return None };
        let (tokens, (rows, pages)) = (positions.elements(), tables.rows_cols());
        let mut counts = vec![tokens / rows; rows];
        counts[0] = 1;
        counts[rows - 1] = tokens - counts[..rows - 1].iter().sum::<usize>();
        let context = case.context.max(*counts.iter().max()?);
        let cache = cache.unwrap_or(rows * pages);
        if context > pages * PAGE_TOKENS || cache < rows * pages {
            return None;
        }
        let decodes = counts.iter().all(|count| *count == 1);
        let mut all = Self { indptr: vec![0], positions: Vec::new(), slots: Vec::new(), tables: Vec::new() };
        for (b, count) in counts.into_iter().enumerate() {
            // Decoding rows are shorter in the step that a graph is captured with, in which no row is padding.
            let len = context - b % (context - count + 1).min(37);
            let len = if decodes && values == Values::Earlier { len.div_ceil(2) } else { len };
            let pads = values == Values::Final && variant.skips(b);
            let unless_padded = |value: usize| if pads { u32::MAX } else { value as u32 };
            all.positions.extend((len - count..len).map(unless_padded));
            all.indptr.push(all.positions.len() as u32);
            all.slots.push(if pads { NO_SLOT } else { (rows - 1 - b) as u32 });
            all.tables.extend((0..pages).map(|j| unless_padded(cache - 1 - (b * pages + j))));
        }
        Some(all)
    }

    /// Variant for blocks (DSpark): rows of equally many tokens, each at the position of its row's anchor; the pages
    /// are those of the step's own tokens, in order. `None` if the tokens are not whole blocks.
    pub fn of_blocks(operands: &[Tensor], case: &Case, (variant, values): (Variant, Values)) -> Option<Self> {
        let [_, positions, _, tables] = operands else { return None };
        let (tokens, (rows, pages)) = (positions.elements(), tables.rows_cols());
        let block = tokens / rows;
        if block * rows != tokens || pages < tokens.div_ceil(PAGE_TOKENS) {
            return None;
        }
        let mut all = Self { indptr: vec![0], positions: Vec::new(), slots: Vec::new(), tables: Vec::new() };
        for b in 0..rows {
            let pads = values == Values::Final && variant.skips(b);
            let anchor = (case.context.max(block + 37) - 1 - b % 37) as u32;
            all.positions.extend(std::iter::repeat_n(if pads { u32::MAX } else { anchor }, block));
            all.indptr.push(all.positions.len() as u32);
            all.slots.push(if pads { NO_SLOT } else { (rows - 1 - b) as u32 });
            all.tables.extend((0..pages as u32).map(|j| if pads { u32::MAX } else { j }));
        }
        Some(all)
    }

    /// Copies them to the device.
    pub fn fill(&self, exec: &mut Exec, operands: &mut [Tensor]) -> Result<(), OpError> {
        let Self { indptr, positions, slots, tables } = self;
        let values = [indptr, positions, slots, tables];
        operands.iter_mut().zip(values).try_for_each(|(tensor, values)| exec.fill_rows(tensor, values))
    }
}
