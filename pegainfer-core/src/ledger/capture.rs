//! What is kept of a slow step and its neighbours, for a trace.

use super::load::StepTime;
use super::watch::{Anomaly, Cause};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Least time between two captures of a class.
const INTERVAL: Duration = Duration::from_secs(10);
/// Most captures of a class in a day: steps that were slow once, and all others.
const A_DAY: usize = 50;
/// A day.
const DAY: Duration = Duration::from_secs(86_400);

/// A slow step, those before it and those behind it.
#[derive(Debug, Clone, PartialEq)]
pub struct Capture {
    /// What was found out.
    pub anomaly: Anomaly,
    /// The steps, oldest first.
    pub steps: Vec<StepTime>,
    /// The slow step, and those behind it.
    pub details: Vec<StepDetail>,
    /// Start of the engine, from which the times of the steps count.
    pub start: Instant,
}

/// A step of an investigation.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepDetail {
    /// Its number.
    pub number: u64,
    /// Times of its ops in their order, where they were measured.
    pub ops: Vec<(&'static str, Duration)>,
    /// The engine when the step ended.
    pub engine: EngineDetail,
}

/// What an engine is asked about a step of an investigation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EngineDetail {
    /// The rows of the step.
    pub rows: Vec<RowDetail>,
    /// Requests that wait.
    pub waiting: usize,
    /// KV blocks that are free.
    pub kv_blocks_free: usize,
}

/// A row of a step of an investigation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowDetail {
    /// Number of its request in the engine.
    pub request: u64,
    /// [`GenerateRequest::label`](crate::engine::GenerateRequest::label); `None` also for a request that has ended.
    pub label: Option<Arc<str>>,
    /// Its tokens in the step.
    pub tokens: usize,
    /// Tokens it attends to, its own included.
    pub context: usize,
}

/// How often slow steps are reported, and captured.
#[derive(Debug, Default)]
pub(super) struct Limits([Limit; 2]);

/// One class of slow steps.
#[derive(Debug, Default)]
struct Limit {
    last: Option<Instant>,
    /// When the day began, and captures in it.
    day: Option<(Instant, usize)>,
}

impl Limits {
    /// Whether a slow step is reported, and whether a capture of it may be written. Steps that were slow once, which are frequent
    /// and tell little, have limits of their own.
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
