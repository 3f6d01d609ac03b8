//! The step type, and the choice of the delta rule's kernel.

use pegainfer_core::exec::Device;
use pegainfer_core::schedule;
pub use pegainfer_core::schedule::{Outcome, SampleRow, StepRow};
pub use pegainfer_kernels::ops::{NO_STATE, Segment};

/// The work of one step, as the scheduler hands it to the executor. Its `state` lists the source and the destination of
/// the recurrent state of each segment.
pub type Step = schedule::Step<Segment>;

/// True if the delta rule of a step with prompts runs in chunks. A CPU always uses the recurrence: it needs fewer
/// operations, and its bits do not depend on how a prompt is split.
pub(crate) fn runs_in_chunks(device: Device) -> bool {
    !matches!(device, Device::Cpu(_))
}
