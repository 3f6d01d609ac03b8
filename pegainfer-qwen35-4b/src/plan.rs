//! The step type, and the choice of the delta rule's kernel.

use pegainfer_core::exec::Device;
use pegainfer_core::schedule;
pub use pegainfer_core::schedule::{Outcome, SampleRow, StepRow};
pub use pegainfer_kernels::ops::{NO_STATE, Segment};

/// The work of one step, as the scheduler hands it to the executor. Its `state` lists the source and the destination of
/// the recurrent state of each segment.
pub type Step = schedule::Step<Segment>;

/// Appends the segments, from row `first` on, of a step without a scheduler: row `b` has its state in slot `b`, and
/// rows that pad a graph keep none.
pub(crate) fn add_segments(step: &mut Step, first: usize) {
    for b in first..step.rows.len() {
        let (first, end, context) = (step.qo_indptr[b], step.qo_indptr[b + 1], step.kv_lens[b]);
        let to = if context == 0 { NO_STATE } else { b as u32 };
        let from = if end - first == context { NO_STATE } else { to };
        step.state.push(Segment { first, end, from, to });
    }
}

/// True if the delta rule of a step with prompts runs in chunks. A CPU always uses the recurrence: it needs fewer
/// operations, and its bits do not depend on how a prompt is split.
pub(crate) fn runs_in_chunks(device: Device) -> bool {
    !matches!(device, Device::Cpu(_))
}
