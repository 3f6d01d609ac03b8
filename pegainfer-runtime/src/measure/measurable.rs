//! The interface of executors whose steps can be measured.

use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::{SequenceState, Step, StepExecutor};
use pegainfer_kernels::sources::Family;
use std::time::Duration;

/// A step of an executor.
pub(super) type StepOf<E> = Step<<<E as StepExecutor>::State as SequenceState>::Row>;

/// An executor whose steps can be measured. If it has several ranks, the ops of rank 0 are timed.
pub trait Measurable: StepExecutor {
    /// Family whose kernels its steps run.
    const FAMILY: Family;

    /// The device of rank 0.
    fn exec(&mut self) -> &mut Exec;

    /// A step with rows given as (new tokens, context with these). Blocks and state slots are numbered consecutively.
    fn step(rows: &[(usize, usize)]) -> StepOf<Self>;

    /// The ops of the step that was launched last, on rank 0, if [`time_ops`](StepExecutor::time_ops) was asked for.
    fn take_timed_ops(&mut self) -> Vec<(OpRecord, Duration)>;
}
