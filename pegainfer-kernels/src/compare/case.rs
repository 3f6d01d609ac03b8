//! The case of a comparison, the values of its inputs, and the outputs of a launch.

use crate::ops::HeadShape;

/// Epsilon of every norm.
pub(super) const EPS: f32 = 1e-6;
/// Tolerance of ids, and of dummy weights.
pub(super) const EXACT: f64 = 0.0;

/// Facts about a recorded call that shapes do not show.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Heads of the attention layers.
    pub shape: HeadShape,
    /// Tokens that the longest row attends to.
    pub context: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// True if activations have values that FP8 holds exactly.
    pub exact_in_fp8: bool,
}

/// Selection of the input values of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Values {
    /// Other values, with shorter contexts for decoding rows: a graph is captured with them.
    Earlier,
    /// The compared values.
    Final,
}

/// Outputs of one call, on the host and in the CPU's layout.
pub(super) struct Output {
    /// Allowed difference of an element, relative to itself plus its row's root mean square.
    pub tolerance: f64,
    /// Elements of a row: the results of one token, or of one KV block.
    pub row: usize,
    pub values: Vec<f32>,
}
