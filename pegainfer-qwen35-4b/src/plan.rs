//! One step's work, and which kernel runs it.

use pegainfer_core::exec::Device;
use pegainfer_core::schedule;
pub use pegainfer_core::schedule::{Outcome, SampleRow, StepRow};
pub use pegainfer_kernels::ops::{NO_STATE, Segment};

/// One step's work, as the scheduler hands it to the executor: its `state` says where the recurrent state of each run of
/// tokens comes from and where it goes.
pub type Step = schedule::Step<Segment>;

/// Adds the segments of the rows from `first` on of a step that no scheduler planned: row `b` has its state in slot `b`,
/// and a row that pads a graph keeps none.
pub(crate) fn add_segments(step: &mut Step, first: usize) {
    for b in first..step.rows.len() {
        let (first, end, context) = (step.qo_indptr[b], step.qo_indptr[b + 1], step.kv_lens[b]);
        let to = if context == 0 { NO_STATE } else { b as u32 };
        let from = if end - first == context { NO_STATE } else { to };
        step.state.push(Segment { first, end, from, to });
    }
}

/// Whether the delta rule of a step with prompts runs in chunks. A CPU always takes the recurrence: it needs fewer
/// operations, and its bits do not depend on how a prompt is cut.
pub(crate) fn runs_in_chunks(device: Device) -> bool {
    !matches!(device, Device::Cpu(_))
}
