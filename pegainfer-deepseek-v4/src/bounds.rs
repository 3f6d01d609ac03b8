//! The largest step of an engine, and how much it keeps.

/// Largest step an executor is built for.
#[derive(Debug, Clone, Copy)]
pub struct StepBounds {
    /// Input tokens.
    pub tokens: usize,
    /// Rows: sequences of a step.
    pub rows: usize,
    /// Tokens behind which a token is sampled.
    pub samples: usize,
    /// Draft tokens that a row verifies. The rings of a slot are longer by as many tokens.
    pub drafts: usize,
    /// Tokens of context.
    pub context: usize,
    /// Slots of recent tokens.
    pub slots: usize,
    /// Pages of compressed entries.
    pub pages: usize,
    /// A GPU replays steps of few tokens as graphs.
    pub graphs: bool,
}
