//! Who runs next, for every engine that computes ragged batches over paged KV: the scheduler, the step that it hands to
//! an executor, and both as one engine.

mod engine;
mod gathering;
mod graphs;
mod memory;
mod scheduler;
mod sequence;
mod step;
mod warm_up;

pub use engine::{Engine, STEPS_IN_FLIGHT, StepExecutor};
pub use graphs::{Graphs, Launches};
pub use memory::{Memory, OutOfMemory};
pub use scheduler::{Scheduler, SchedulerConfig};
pub use step::{FROM_PREVIOUS, Outcome, SampleRow, Step, StepRow};
pub use warm_up::warm_up;
