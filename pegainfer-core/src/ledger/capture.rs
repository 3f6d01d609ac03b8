//! Data kept about a slow step and its neighbours, for a trace.

use super::load::StepTime;
use super::watch::{Anomaly, Cause};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Minimum time between two captures of a class.
const INTERVAL: Duration = Duration::from_secs(10);
/// Daily limit of captures of each class: steps that were slow once, and all others.
const A_DAY: usize = 50;
/// A day.
const DAY: Duration = Duration::from_secs(86_400);

/// A slow step and the steps before and after it.
#[derive(Debug, Clone, PartialEq)]
pub struct Capture {
    /// The anomaly found.
    pub anomaly: Anomaly,
    /// The steps, oldest first.
    pub steps: Vec<StepTime>,
    /// The slow step and the steps after it.
    pub details: Vec<StepDetail>,
    /// Start of the engine; step times are relative to it.
    pub start: Instant,
}

/// A step of an investigation.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepDetail {
    /// Number of the step.
    pub number: u64,
    /// Op times in launch order, if measured.
    pub ops: Vec<(&'static str, Duration)>,
    /// The engine when the step ended.
    pub engine: EngineDetail,
}

/// Engine state during a step of an investigation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EngineDetail {
    /// The rows of the step.
    pub rows: Vec<RowDetail>,
    /// Number of waiting requests.
    pub waiting: usize,
    /// Number of free KV blocks.
    pub kv_blocks_free: usize,
}

/// A row of a step of an investigation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowDetail {
    /// Number of its request in the engine.
    pub request: u64,
    /// [`GenerateRequest::label`](crate::engine::GenerateRequest::label); `None` also for a request that has ended.
    pub label: Option<Arc<str>>,
    /// Number of its tokens in the step.
    pub tokens: usize,
    /// Context in tokens, including its own.
    pub context: usize,
}

/// Limits of reports and captures of slow steps.
#[derive(Debug, Default)]
pub(super) struct Limits([Limit; 2]);

/// Limits of one class of slow steps.
#[derive(Debug, Default)]
struct Limit {
    last: Option<Instant>,
    /// Start of the day, and captures in it.
    day: Option<(Instant, usize)>,
}

impl Limits {
    /// Returns whether a slow step is reported, and whether a capture may be written. Steps that were slow once are
    /// frequent and tell little, so they have their own limits.
    pub fn take(&mut self, cause: Cause, now: Instant) -> (bool, bool) {
        let limit = &mut self.0[usize::from(cause == Cause::Once)];
        if limit.last.is_some_and(|last| now.saturating_duration_since(last) < INTERVAL) {
            return (false, false);
        }
        limit.last = Some(now);
        let (began, taken) = limit.day.filter(|day| now.saturating_duration_since(day.0) < DAY).unwrap_or((now, 0));
        let captured = taken < A_DAY;
        limit.day = Some((began, taken + usize::from(captured)));
        (true, captured)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn captures_are_limited_to_one_in_ten_seconds_and_fifty_a_day_of_each_class() {
        let (start, mut limits) = (Instant::now(), Limits::default());
        let (mut reported, mut captured) = ([0; 2], [0; 2]);
        // A slow step of each class every 3 seconds, for two days.
        for i in 0..2 * 86_400 / 3 {
            for (class, cause) in [Cause::Op, Cause::Once].into_iter().enumerate() {
                let (report, capture) = limits.take(cause, start + Duration::from_secs(3 * i));
                reported[class] += usize::from(report);
                captured[class] += usize::from(capture);
                assert!(report || !capture);
            }
        }
        assert_eq!((reported, captured), ([2 * 86_400 / 12; 2], [2 * A_DAY; 2]));
    }
}
