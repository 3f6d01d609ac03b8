//! The ledger: measured step times of one model on one device, and the law that predicts the time of any step from them.
//!
//! - [`StepLoad`]: what a step asks of a device.
//! - [`measure`](measure()): runs a grid of steps and returns their times.
//! - [`Anchor`]: some of these steps measured again on another card, and the factors that follow.
//! - [`Law`]: step times as a function of the load, and how far it is off where it was not measured.
//! - [`OpShares`]: how the time of a step is shared among its ops.
//! - [`StepLog`]: times of the steps of a running engine; [`Watch`]: what it says of steps that take longer than predicted;
//!   [`Capture`]: such a step and its neighbours, for a trace; [`Drift`]: steps that take longer than they did.
//! - [`Ledger`]: measured times as a file of JSON Lines, with the properties of the engine that was measured.
//!
//! The truth is the whole step, because the times of ops measured alone do not add up to it; times of ops say where it goes.

mod anchor;
mod capture;
mod check;
mod drift;
mod file;
mod grid;
mod kernel_line;
mod law;
mod load;
mod op_shares;
mod step_log;
mod surface;
mod watch;

pub use anchor::{Anchor, Remeasured, StepGroup, blocks_of, measure_again};
pub use capture::{Capture, EngineDetail, RowDetail, StepDetail};
pub use drift::Drift;
pub use file::{Header, HostCost, Ledger, LedgerError, OpLine};
pub use grid::{Effort, GridLimits, MeasureStep, Rows, Selection, blocks_of_rows, measure, measure_steps};
pub use kernel_line::KernelLine;
pub use law::{Law, LawError, Prediction, Residual};
pub use load::{StepKind, StepLine, StepLoad, StepTime};
pub use op_shares::OpShares;
pub use step_log::{FinishedStep, StepLog, StepTotals};
pub use watch::{Anomaly, Cause, Watch};
