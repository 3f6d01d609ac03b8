//! Scheduler functions for replaying a recorded schedule: masks and failures of grammars come from the recording
//! instead of another thread.

use super::Scheduler;
use crate::engine::{EventBatch, RequestId};
use crate::schedule::sequence::Sequence;
use crate::schedule::sequence_grammar::SequenceGrammar;
use crate::schedule::state::SequenceState;
use crate::schedule::step::{Outcome, Step};

impl<S: SequenceState> Scheduler<S> {
    /// Requests that the next plan skips because of their grammars.
    pub(in crate::schedule) fn waiting_for_masks(&self) -> Vec<u64> {
        let sequences = self.running.iter().chain(self.waiting.iter().map(AsRef::as_ref));
        sequences.filter(|seq| seq.grammar.is_waited_for(seq.unknown > 0)).map(|seq| seq.id.0).collect()
    }

    /// Gives the request `id`, which was just added, a grammar.
    pub(in crate::schedule) fn replay_grammar(&mut self, id: RequestId) {
        if let Some(seq) = self.waiting.iter_mut().find(|seq| seq.id == id) {
            seq.grammar = SequenceGrammar::Replayed { is_waited_for: false };
        }
    }

    /// Plans a step like [`plan`](Self::plan), but leaves out the requests in `waiting_for_mask`.
    pub(in crate::schedule) fn replay_plan(
        &mut self,
        delay_admission: bool,
        waiting_for_mask: &[u64],
    ) -> (Step<S::Row>, EventBatch) {
        for seq in self.running.iter_mut().chain(&mut self.waiting) {
            seq.grammar.set_waited_for(waiting_for_mask.contains(&seq.id.0));
        }
        self.plan_with_known_masks(delay_admission)
    }

    /// Variant of [`commit`](Self::commit) after which the grammars of the requests in `failed` have failed.
    pub(in crate::schedule) fn replay_commit(&mut self, step: &Step<S::Row>, outcome: Outcome, failed: &[u64]) {
        self.take_outcome(step, outcome);
        self.replay_fail(failed);
    }

    /// Variant of [`fail_errored`](Self::fail_errored) for the requests in `failed`.
    pub(in crate::schedule) fn replay_fail(&mut self, failed: &[u64]) {
        let error = |seq: &Sequence<S::Slot>| failed.contains(&seq.id.0).then(String::new);
        self.fail(error);
    }
}
