//! The largest step of an engine, and how much it keeps.

/// Largest step an executor is built for.
#[derive(Debug, Clone, Copy)]
pub struct StepBounds {
    /// Input tokens.
    pub tokens: usize,
    /// Rows.
    pub rows: usize,
    /// Samples.
    pub samples: usize,
    /// Draft tokens of a row, at most: slots remember so many tokens more.
    pub drafts: usize,
    /// Tokens of context.
    pub context: usize,
    /// Slots of recent tokens.
    pub slots: usize,
    /// Pages of compressed entries.
    pub pages: usize,
    /// A GPU replays decode steps as graphs.
    pub graphs: bool,
}
