//! Kernels of a served step, as recorded by a profiler of the device.

use super::load::StepLoad;
use serde::{Deserialize, Serialize};

/// Time that the calls of one kernel add to a measured step, over all layers. Overlapped kernels run at the same time,
/// so their own times do not add up to the step, but the times between the ends of successive kernels do.
/// do not add up to the step; the times between the ends of successive kernels do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelLine {
    /// Load of the step.
    #[serde(flatten)]
    pub load: StepLoad,
    /// Name of the kernel's function.
    pub kernel: String,
    /// Blocks in each direction.
    pub grid: [i32; 3],
    /// Calls in the step.
    pub calls: usize,
    /// Microseconds from the end of the kernel that ended before to the end of this one, over all calls.
    pub us: f64,
    /// Part of the time in which no kernel ran.
    pub idle_us: f64,
    /// Microseconds from the begin to the end of this kernel, over all calls.
    pub own_us: f64,
}
