//! Kernels of a step as it is served, as a profiler of the device has recorded them.

use super::load::StepLoad;
use serde::{Deserialize, Serialize};

/// What the calls of one kernel add to a measured step, over all layers. Overlapped kernels run at the same time, so that their own times
/// do not add up to the step; the times between the ends of successive kernels do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelLine {
    /// What the step asked of the device.
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
    /// The part of them in which no kernel ran.
    pub idle_us: f64,
    /// Microseconds from the begin to the end of this kernel, over all calls.
    pub own_us: f64,
}
