//! Scheduling for every engine that computes ragged batches over paged KV: the scheduler, the step that it gives to an
//! executor, and the engine that joins both.

mod adapter_slots;
mod encoding;
mod engine_core;
mod graphs;
mod loading;
mod policy;
pub mod recording;
mod scheduler;
mod segment;
mod sequence;
mod sequence_grammar;
mod slot_pool;
pub mod speculation;
mod state;
mod state_slots;
mod step;
mod step_adapters;
mod step_executor;
mod step_timing;
mod turns;

pub use encoding::EncodePart;
pub use engine_core::{EngineCore, TokenBudget};
pub use graphs::{GRAPH_SIZES, Graphs, Launches};
pub use scheduler::{Scheduler, SchedulerConfig};
pub use segment::{NO_STATE, SEGMENT_WORDS, Segment};
pub use slot_pool::SlotRef;
pub use state::{OutOfSlots, SequenceState, StateConfig};
pub use state_slots::StateSlots;
pub use step::{Outcome, PLACEHOLDER, SampleRow, Step, StepRow};
pub use step_adapters::{NO_ADAPTER, StepAdapters};
pub use step_executor::{STEPS_IN_FLIGHT, StepExecutor};
pub(crate) use turns::group;
