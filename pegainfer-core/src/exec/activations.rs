//! Format of activations.

/// Activations of GEMMs with group-quantised weights on the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activations {
    /// No rounding: weights are widened to f32. Slow; the only error is that of f32 sums.
    #[default]
    Exact,
    /// Rounded to int8 with a scale for each 32 columns of a row (W4A8). Sums are integers, so that weights are read
    /// at the rate of the memory.
    Int8,
}
