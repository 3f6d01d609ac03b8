//! Format of activations.

/// Activations of GEMMs with group-quantised weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activations {
    /// No rounding. On a CPU weights are widened to f32: slow; the only error is that of f32 sums. A GPU widens them to
    /// bf16 if there are many rows.
    #[default]
    Exact,
    /// On a CPU rounded to int8 with a scale for each 32 columns of a row (W4A8): sums are integers, so that weights are
    /// read at the rate of the memory. On a GPU exact.
    Rounded,
    /// On a CPU as [`Rounded`](Self::Rounded). On a GPU of compute capability 9.0 with integers of four bits and many
    /// rows: rounded to e4m3 with a scale for each 128 columns of a row.
    RoundedPrompts,
}
