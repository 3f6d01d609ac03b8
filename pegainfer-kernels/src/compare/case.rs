//! What a comparison is about: the case, the values of its inputs and the outputs of a launch.

use crate::ops::HeadShape;

/// Epsilon of every norm.
pub(super) const EPS: f32 = 1e-6;
/// Tolerance of ids, and of dummy weights.
pub(super) const EXACT: f64 = 0.0;

/// What a recorded call does not say in shapes.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Heads of the attention layers.
    pub shape: HeadShape,
    /// Tokens that the longest row attends to.
    pub context: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether activations have values that FP8 holds exactly.
    pub exact_in_fp8: bool,
}

/// Which values the inputs of a launch have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Values {
    /// Others, of shorter contexts where rows decode: a graph is captured with them.
    Earlier,
    /// Those that are compared.
    Final,
}

/// Outputs of one call, on the host and in the CPU's layout.
pub(super) struct Output {
    /// What an element may differ by, relative to itself plus its row's root mean square.
    pub tolerance: f64,
    /// Elements of a row: of what one token, or one KV block, gave.
    pub row: usize,
    pub values: Vec<f32>,
}
