//! What can be measured.

use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::{SequenceState, Step, StepExecutor};
use std::time::Duration;

/// A step of an executor.
pub(super) type StepOf<E> = Step<<<E as StepExecutor>::State as SequenceState>::Row>;

/// An executor whose steps can be measured. Of several ranks, rank 0 is.
pub trait Measurable: StepExecutor {
    /// The device of rank 0.
    fn exec(&mut self) -> &mut Exec;

    /// A step of `rows`, each with the tokens that it adds and its context, whose blocks and state slots are numbered through.
    fn step(rows: &[(usize, usize)]) -> StepOf<Self>;

    /// The ops of the step that was launched last, on rank 0, if [`time_ops`](StepExecutor::time_ops) was asked for.
    fn take_timed_ops(&mut self) -> Vec<(OpRecord, Duration)>;
}
