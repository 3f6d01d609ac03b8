//! The type of one step of the model, the argument of all parts of the forward pass.

/// Qwen3.5, 0.8B to 27B, and its siblings with experts, 35B-A3B to 397B-A17B.
#[derive(Debug)]
pub struct Qwen35;

/// The borrowed parts of one step.
pub(crate) type Pass<'a> = pegainfer_runtime::Pass<'a, Qwen35>;
