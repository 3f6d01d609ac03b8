//! One step's work, and which kernel runs it.

use pegainfer_core::exec::Device;
use pegainfer_core::schedule;
pub use pegainfer_core::schedule::{Outcome, SampleRow, StepRow};
use pegainfer_kernels::ops::BLOCK_SIZE;
pub use pegainfer_kernels::ops::{NO_STATE, Segment};

/// One step's work, as the scheduler hands it to the executor: its `state` says where the recurrent state of each run of
/// tokens comes from and where it goes.
pub type Step = schedule::Step<Segment>;

/// As `schedule::Step::uniform`, row `b` with its state in slot `b`.
pub fn uniform(batch: usize, tokens: usize, context: usize) -> Step {
    ragged(&vec![(tokens, context); batch])
}

/// As `schedule::Step::ragged`, row `b` with its state in slot `b`.
pub fn ragged(rows: &[(usize, usize)]) -> Step {
    let mut step = Step::ragged(BLOCK_SIZE, rows);
    let ends = step.qo_indptr.windows(2);
    let segment = |(b, ((tokens, context), ends)): (usize, (&(usize, usize), &[u32]))| {
        let from = if tokens == context { NO_STATE } else { b as u32 };
        Segment { first: ends[0], end: ends[1], from, to: b as u32 }
    };
    step.state = rows.iter().zip(ends).enumerate().map(segment).collect();
    step
}

/// As `schedule::Step::padded`; the state of an added row is kept nowhere.
pub fn padded(step: &Step, rows: usize) -> Step {
    let mut padded = step.padded(rows);
    let added = step.rows.len() as u32..rows as u32;
    padded.state.extend(added.map(|t| Segment { first: t, end: t + 1, from: NO_STATE, to: NO_STATE }));
    padded
}

/// Whether the delta rule of a step with prompts runs in chunks. A CPU always takes the recurrence: it needs fewer
/// operations, and its bits do not depend on how a prompt is cut.
pub fn runs_in_chunks(device: Device) -> bool {
    !matches!(device, Device::Cpu(_))
}
