//! The ledger: measured step times of one model on one device, and a law that predicts the time of any step from them.
//!
//! - [`StepLoad`]: the work of a step.
//! - [`measure`](measure()): runs a grid of steps and returns their times.
//! - [`Anchor`]: some of these steps measured again on another card, and the resulting factors.
//! - [`Law`]: step times as a function of the load, and its errors at held-out steps.
//! - [`OpShares`]: shares of ops in the time of a step.
//! - [`StepLog`]: step times of a running engine; [`Watch`]: finds steps that take longer than predicted; [`Capture`]:
//!   such a step and its neighbours, for a trace; [`Drift`]: detects that steps have become slower. [`ExpertLoad`]: how
//!   evenly tokens spread over experts.
//! - [`Ledger`]: measured times as a file of JSON Lines, with the properties of the measured engine.
//!
//! Whole steps are the ground truth, because the times of separately measured ops do not add up to them. Op times show
//! where the time goes.

mod anchor;
mod capture;
mod check;
mod drift;
mod expert_load;
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
pub use expert_load::{ExpertCounts, ExpertLoad, LoadHistogram};
pub use file::{Header, HostCost, Ledger, LedgerError, OpLine};
pub use grid::{Effort, GridLimits, MeasureStep, Rows, Selection, blocks_of_rows, measure, measure_steps};
pub use kernel_line::KernelLine;
pub use law::{Law, LawError, Prediction, Residual};
pub use load::{StepKind, StepLine, StepLoad, StepTime};
pub use op_shares::OpShares;
pub use step_log::{FinishedStep, StepLog, StepTotals};
pub use watch::{Anomaly, Cause, Watch};
