//! State slots that the tokens of a step read and write.

use super::step::Step;

/// Placeholder for a slot: as `from`, the sequence starts with a state of zeros; as `to`, the state is not kept.
pub const NO_STATE: u32 = u32::MAX;

/// Words of a packed [`Segment`].
pub const SEGMENT_WORDS: usize = 4;

/// Consecutive tokens of one sequence in a step. A segment may continue from the slot that the previous one wrote; in
/// this way a step leaves a snapshot of the state in the middle of a prompt. Segments joined in this way run in order.
/// All others run at once and must not read or write a slot that another one writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Segment {
    /// First token, an index into the step's tokens.
    pub first: u32,
    /// End of the tokens.
    pub end: u32,
    /// Slot of the state before the first token, or [`NO_STATE`].
    pub from: u32,
    /// Slot of the state after the last token, or [`NO_STATE`]; may be `from`.
    pub to: u32,
}

impl Segment {
    /// Layout that the kernels read.
    pub fn words(&self) -> [u32; SEGMENT_WORDS] {
        [self.first, self.end, self.from, self.to]
    }

    /// The segments of a packed tensor.
    pub fn unpack(words: &[u32]) -> impl Iterator<Item = Self> + Clone + '_ {
        words.as_chunks().0.iter().map(|&[first, end, from, to]: &[u32; SEGMENT_WORDS]| Self { first, end, from, to })
    }

    /// The tokens.
    pub fn tokens(&self) -> std::ops::Range<usize> {
        self.first as usize..self.end as usize
    }
}

impl Step<Segment> {
    /// Appends the segments, from row `first` on, of a step without a scheduler: row `b` has its state in slot `b`, and
    /// rows that pad a graph keep none.
    pub fn add_segments(&mut self, first: usize) {
        for b in first..self.rows.len() {
            let (first, end, context) = (self.qo_indptr[b], self.qo_indptr[b + 1], self.kv_lens[b]);
            let to = if context == 0 { NO_STATE } else { b as u32 };
            let from = if end - first == context { NO_STATE } else { to };
            self.state.push(Segment { first, end, from, to });
        }
    }
}
