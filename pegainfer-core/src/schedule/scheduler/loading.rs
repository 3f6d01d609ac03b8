//! Blocks outside the device: what is stored there, and requests that wait for what is loaded.
//!
//! A waiting request that is next and whose prompt continues in the host tier stays in the queue while those blocks are
//! loaded, and others run. When they are on the device it is admitted like any request with a cached prefix. It waits
//! for at most one load of its own; whatever that fails to bring is computed.

use super::Scheduler;
use crate::kv::BlockTable;
use crate::kv::tiers::{LoadStart, LoadWish, LoadedState, Tiers, Transfer, TransferDone, TransferId};
use crate::schedule::loading::Loading;
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
        if let Some(LoadedState { table, tokens, state }) = tiers.finish(done) {
            self.state.keep(&table, tokens, state);
        }
        self.stop_waiting(id);
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

    /// True if the waiting sequence at this place, which has begun, waits for blocks from now on.
    pub(super) fn waits_for_load(&mut self, at: usize) -> bool {
        let (Some(tiers), Some(seq)) = (&mut self.tiers, self.waiting.get_mut(at)) else { return false };
        // Cached tokens have no prompt logprobs.
        if !matches!(seq.loading, Loading::Unknown | Loading::Read) || seq.prompt_logprobs.is_some() {
            return false;
        }
        let wish = LoadWish {
            root: seq.table.root(),
            tokens: &seq.tokens[..seq.before_images()],
            spared: self.running.len(),
            ahead: self.running.iter().map(|seq| seq.remaining()).filter(|tokens| *tokens > 1).sum(),
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
