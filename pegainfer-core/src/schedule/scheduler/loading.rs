//! Blocks outside the device: what is stored there, and requests that wait for what is loaded.
//!
//! A waiting request that is next and whose prompt continues in the host tier stays in the queue while those blocks are
//! loaded, and others run. When they are on the device they are held for it, and it is admitted like any request with a
//! cached prefix. Whatever a load fails to bring is computed. If a running sequence, or a request before it, needs the
//! blocks that are held, the request loses them and looks again when its turn comes.

use super::Scheduler;
use crate::kv::BlockTable;
use crate::kv::tiers::{LoadStart, LoadWish, Loaded, Tiers, Transfer, TransferDone, TransferId};
use crate::schedule::loading::Loading;
use crate::schedule::sequence::Sequence;
use crate::schedule::state::SequenceState;
use std::time::Duration;

impl<S: SequenceState> Scheduler<S> {
    /// Keeps copies of full blocks outside the device, and of kept states, for which a model that has such needs slots.
    /// Before the first request.
    pub fn use_tiers(&mut self, tiers: Tiers<S::Kept>) {
        self.state.list_new();
        self.tiers = Some(tiers);
    }

    /// The tiers, if there are any.
    pub fn tiers(&self) -> Option<&Tiers<S::Kept>> {
        self.tiers.as_ref()
    }

    /// Transfers to be started, in order.
    pub fn take_transfers(&mut self) -> Vec<Transfer> {
        self.tiers.as_mut().map(Tiers::take_started).unwrap_or_default()
    }

    /// Takes the end of a transfer; requests that waited for it can be admitted.
    pub fn finish_transfer(&mut self, done: TransferDone) {
        let Some(tiers) = &mut self.tiers else { return };
        let id = done.id;
        if let Some(Loaded { table, state }) = tiers.finish(done) {
            if let Some(state) = state {
                self.state.keep(&table, table.blocks().len() * table.block_tokens(), state);
            }
            let mut waiting = self.waiting.iter_mut();
            if let Some(seq) = waiting.find(|seq| seq.loading.is_for(id)) {
                seq.loaded = Some(table);
            }
        }
        self.stop_waiting(id);
    }

    /// Lets go of the blocks that were loaded for the last waiting request that has some, except for the one at place
    /// `but`. False if there is none.
    pub(super) fn release_loaded(&mut self, but: Option<usize>) -> bool {
        if self.tiers.is_none() {
            return false;
        }
        let has_some = |seq: &Sequence<S::Slot>| seq.loaded.is_some() && seq.loading.transfer().is_none();
        let mut waiting = self.waiting.iter_mut().enumerate().rev();
        let Some((_, seq)) = waiting.find(|(at, seq)| Some(*at) != but && has_some(seq)) else { return false };
        (seq.loaded, seq.loading) = (None, Loading::Unknown);
        true
    }

    /// Requests that wait for this transfer are admitted without it.
    pub fn give_up(&mut self, id: TransferId) {
        self.stop_waiting(id);
    }

    fn stop_waiting(&mut self, id: TransferId) {
        for seq in self.waiting.iter_mut().filter(|seq| seq.loading.transfer() == Some(id)) {
            seq.loading = seq.loading.ended();
        }
    }

    /// A step computed `tokens` tokens.
    pub(in crate::schedule) fn computed(&mut self, tokens: usize, took: Duration) {
        self.tiers.iter_mut().for_each(|tiers| tiers.computed(tokens, took));
    }

    /// Number of prompt tokens that are computed before those of the waiting sequence at this place: of running
    /// sequences, and of those before it, without what is being loaded for them.
    fn tokens_before(&self, at: usize) -> usize {
        let Some(tiers) = &self.tiers else { return 0 };
        let running = self.running.iter().map(|seq| seq.remaining()).filter(|tokens| *tokens > 1);
        let waiting = self.waiting.iter().take(at).filter_map(|seq| {
            let loaded = tiers.loads(seq.loading.transfer()?);
            Some(seq.tokens.len().saturating_sub(loaded))
        });
        running.chain(waiting).sum()
    }

    /// True if the waiting sequence at this place, which has begun, waits for blocks from now on.
    pub(super) fn waits_for_load(&mut self, at: usize) -> bool {
        let ahead = self.tokens_before(at);
        let (Some(tiers), Some(seq)) = (&mut self.tiers, self.waiting.get_mut(at)) else { return false };
        // Cached tokens have no prompt logprobs.
        if !matches!(seq.loading, Loading::Unknown | Loading::Read) || seq.prompt_logprobs.is_some() {
            return false;
        }
        let wish = LoadWish {
            root: seq.table.root(),
            tokens: &seq.tokens[..seq.before_images()],
            spared: self.running.len(),
            ahead,
            may_read: seq.loading == Loading::Unknown,
        };
        let usable = |table: &BlockTable| self.state.usable(table, table.blocks().len() * table.block_tokens());
        seq.loading = match tiers.start_load(wish, usable, || self.state.allocate()) {
            Some(LoadStart::Own(id)) => Loading::Own(id),
            Some(LoadStart::Reading(id)) => Loading::Reading(id),
            Some(LoadStart::Other(id)) => Loading::Other(id),
            None => Loading::Done,
        };
        seq.loading.transfer().is_some()
    }
}
