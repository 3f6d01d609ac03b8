//! The passes that follow from a step.

/// The layers that a pass runs through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PassKind {
    /// All layers of the model.
    Layers,
    /// Layers that draft one token after the other (multi-token prediction).
    Drafts {
        /// If true, input is the layers' own drafts, otherwise the tokens of a step.
        again: bool,
    },
    /// Layers that draft blocks, over the blocks after a step.
    Blocks,
}
