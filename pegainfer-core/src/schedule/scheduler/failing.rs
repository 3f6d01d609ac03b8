//! Recovery from steps that fail while the device survives.
//!
//! An error does not say which row of the step the device refused. The sequence at fault is found in at most three
//! failures, and only that sequence ends with the error:
//!
//! 1. After a failed step every running sequence releases its blocks and waits at the front of the queue, as if
//!    preempted. Nothing that the step wrote is read again: only committed steps add blocks and snapshots to the prefix
//!    cache. Other steps in flight are dropped without a trace.
//! 2. A sequence that was in two failed steps since its last token is a suspect. Suspects run one after the other, each
//!    with nothing else in flight, until it gets a token.
//! 3. A sequence that was in a failed step and fails again as the only row of a step ends.
//!
//! Each failure brings a sequence closer to its end, and only a new token resets that, so retries are bounded. While
//! there are suspects the other sequences wait, usually for one step per suspect.

use super::Scheduler;
use crate::engine::{EventBatch, RequestId, TokenEvent};
use crate::schedule::sequence::Sequence;
use crate::schedule::state::SequenceState;
use crate::schedule::step::Step;

/// Number of failed steps without a new token after which a sequence runs alone.
const SUSPECT_FAILURES: u32 = 2;

impl<S: SequenceState> Scheduler<S> {
    /// Handles the failure of `failed`, a step in flight, with `error`. All steps in flight are dropped; none may still
    /// run. Returns the end of the sequence at fault, if it is known. All other sequences are queued again.
    pub fn fail_step(&mut self, failed: &Step<S::Row>, error: &str) -> EventBatch {
        self.in_flight = 0;
        self.stats.failed_steps += 1;
        self.has_failures = true;
        let mut events = EventBatch::new();
        for row in &failed.rows {
            let seq = self.running.at_index(row.sequence).filter(|seq| seq.id == row.id && !seq.is_finished());
            let Some(seq) = seq else { continue };
            if failed.rows.len() == 1 && seq.failures > 0 {
                seq.finished = true;
                events.push((seq.id, TokenEvent::Failed { error: error.to_owned() }));
            } else {
                seq.failures += 1;
            }
        }
        self.queue_running_again(|_| true);
        self.ended = false;
        events
    }

    /// The suspect that the next step is for, if any. With no step in flight, all other sequences have released their
    /// blocks, so it fits.
    pub(super) fn next_suspect(&mut self) -> Option<RequestId> {
        if !self.has_failures {
            return None;
        }
        let all = || self.running.iter().chain(self.waiting.iter().map(Box::as_ref)).filter(|seq| !seq.is_finished());
        let suspect = all().find(|seq| seq.failures >= SUSPECT_FAILURES).map(|seq| seq.id);
        self.has_failures = all().any(|seq| seq.failures > 0);
        if let Some(id) = suspect.filter(|id| self.in_flight == 0 && self.running.iter().any(|seq| seq.id != *id)) {
            self.queue_running_again(|seq| seq.id != id);
        }
        suspect
    }

    /// Queue position of the next request to admit, among all requests or only for a `suspect`, which runs alone.
    pub(super) fn next_admission(&self, suspect: Option<RequestId>) -> Option<usize> {
        match suspect {
            None => self.admissible().map(|(at, _)| at).next(),
            Some(id) => self.waiting.iter().position(|seq| seq.id == id),
        }
    }

    /// Takes the blocks of the `chosen` running sequences and queues them again in the same order, before all waiting
    /// requests. Drops those that have ended. No step may be in flight.
    fn queue_running_again(&mut self, chosen: impl Fn(&Sequence<S::Slot>) -> bool) {
        let (again, stay): (Vec<_>, Vec<_>) = self.running.take().into_iter().partition(|seq| chosen(seq));
        stay.into_iter().for_each(|seq| self.running.push(seq));
        for mut seq in again.into_iter().rev().filter(|seq| !seq.is_finished()) {
            seq.forget_steps();
            seq.release();
            self.waiting.push_front(seq);
        }
    }
}
