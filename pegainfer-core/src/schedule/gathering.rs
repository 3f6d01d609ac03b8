//! When to wait for prompts that are on their way.
//!
//! Clients that send many requests at once do not send them in one instant: a step that begins with the first few holds
//! up both those that came too late for it and its own sequences, whose next step then has to compute the late prompts.
//! So while prompts keep coming, they gather; sequences that decode go on meanwhile.

use std::time::{Duration, Instant};

/// Requests belong together if they come closer to each other than this.
const GAP: Duration = Duration::from_millis(2);
/// Waiting may take up to this part of the time that the prompts which wait will take.
const PATIENCE: f64 = 0.125;
/// Seconds a token of a prompt takes, until a step has told.
const GUESS: f64 = 1e-5;
/// Fewest tokens of a step that tells how long a token takes.
const TELLING: usize = 512;

/// Arrivals, and how fast the device computes prompts.
#[derive(Debug)]
pub(super) struct Gathering {
    /// When the newest request came.
    newest: Option<Instant>,
    /// Since when prompts are held back.
    since: Option<Instant>,
    /// Seconds a token of a prompt takes.
    pace: f64,
}

impl Gathering {
    pub fn new() -> Self {
        Self { newest: None, since: None, pace: GUESS }
    }

    /// A request came.
    pub fn arrived(&mut self, now: Instant) {
        self.newest = Some(now);
    }

    /// The device took `time` for a step of `tokens` tokens.
    pub fn computed(&mut self, tokens: usize, time: Duration) {
        if tokens >= TELLING {
            // One step may have had to wait for something else.
            self.pace += (time.as_secs_f64() / tokens as f64 - self.pace) / 4.0;
        }
    }

    /// Whether to hold back the requests that wait, of so many `tokens`: `None` if there is no crowd of them, or no room
    /// for more.
    pub fn holds(&mut self, tokens: Option<usize>, now: Instant) -> bool {
        let coming = self.newest.is_some_and(|newest| now.duration_since(newest) < GAP);
        let Some(tokens) = tokens.filter(|_| coming) else {
            self.since = None;
            return false;
        };
        let since = *self.since.get_or_insert(now);
        now.duration_since(since).as_secs_f64() < tokens as f64 * self.pace * PATIENCE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crowd_is_held_back_while_it_grows_and_no_longer_than_is_worth_it() {
        let (mut gathering, start) = (Gathering::new(), Instant::now());
        let at = |us| start + Duration::from_micros(us);
        (0..40).for_each(|_| gathering.computed(1000, Duration::from_millis(16)));
        gathering.computed(1, Duration::from_secs(1));
        gathering.arrived(at(0));
        assert!(!gathering.holds(None, at(0)), "one alone begins");
        gathering.arrived(at(500));
        assert!(gathering.holds(Some(2000), at(500)));
        assert!(gathering.holds(Some(2000), at(2400)));
        assert!(!gathering.holds(Some(2000), at(2500)), "no more came for 2 ms");
        gathering.arrived(at(2600));
        assert!(gathering.holds(Some(500), at(2600)));
        assert!(!gathering.holds(Some(500), at(3600)), "500 tokens take 8 ms, and an eighth of that is over");
        gathering.arrived(at(3700));
        assert!(gathering.holds(Some(1000), at(3700)), "with another prompt there is more to gain");
    }
}
