//! One step's work: the KV cache is all that Qwen3 remembers, so a step needs nothing else.

use pegainfer_core::schedule;
pub use pegainfer_core::schedule::{FROM_PREVIOUS, Outcome, SampleRow, StepRow};

/// One step's work, as the scheduler hands it to the executor.
pub type Step = schedule::Step;
