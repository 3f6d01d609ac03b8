//! The clock of an engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Clock that an engine and its handles read. Clones share one time.
#[derive(Debug, Clone, Default)]
pub enum Clock {
    /// The wall clock.
    #[default]
    Wall,
    /// The clock of a simulation.
    Simulated(SimulatedClock),
}

impl Clock {
    /// The time now.
    pub fn now(&self) -> Instant {
        match self {
            Self::Wall => Instant::now(),
            Self::Simulated(clock) => clock.now(),
        }
    }
}

/// Simulated clock; moves only when a caller advances it. Clones share one time.
#[derive(Debug, Clone)]
pub struct SimulatedClock {
    start: Instant,
    /// Nanoseconds since `start`.
    elapsed: Arc<AtomicU64>,
}

impl SimulatedClock {
    /// A clock that reads `start`.
    pub fn new(start: Instant) -> Self {
        Self { start, elapsed: Arc::default() }
    }

    /// The simulated time now.
    pub fn now(&self) -> Instant {
        self.start + self.elapsed()
    }

    /// Time since the start of the clock.
    pub fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.elapsed.load(Ordering::Acquire))
    }

    /// Advances the clock by `time`.
    pub fn advance(&self, time: Duration) {
        self.elapsed.fetch_add(nanos(time), Ordering::AcqRel);
    }

    /// Advances the clock to `time`, unless that has passed.
    pub fn advance_to(&self, time: Instant) {
        self.advance_to_elapsed(time.saturating_duration_since(self.start));
    }

    /// Advances to `elapsed` after the start of the clock; see [`advance_to`](Self::advance_to).
    pub fn advance_to_elapsed(&self, elapsed: Duration) {
        self.elapsed.fetch_max(nanos(elapsed), Ordering::AcqRel);
    }
}

/// Nanoseconds of `time`; 64 bits are enough for 584 years.
fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_simulated_clock_moves_when_told_and_never_backwards() {
        let start = Instant::now();
        let clock = SimulatedClock::new(start);
        let shared = Clock::Simulated(clock.clone());
        assert_eq!(shared.now(), start);
        clock.advance(Duration::from_secs(3));
        clock.advance_to(start + Duration::from_secs(2));
        assert_eq!(shared.now(), start + Duration::from_secs(3));
        clock.advance_to(start + Duration::from_hours(5));
        assert_eq!(shared.now(), start + Duration::from_hours(5));
        clock.advance_to_elapsed(Duration::from_hours(6));
        clock.advance_to_elapsed(Duration::from_hours(1));
        assert_eq!((clock.elapsed(), shared.now()), (Duration::from_hours(6), start + Duration::from_hours(6)));
    }
}
