//! What the log of changes hears of the tiers.

use super::kept::KeptState;
use super::tiers::Tiers;
use crate::kv::disk::SlotHeader;
use crate::kv::{ContentName, KvChange, Medium, StoredRun};

impl<K: KeptState> Tiers<K> {
    /// Logs that blocks can be found in a medium: those that these slots of the host hold now. Blocks without a known
    /// root are not told of.
    pub(super) fn tell_stored(&self, medium: Medium, slots: &[u32]) {
        if !self.pool.is_watched() {
            return;
        }
        let mut runs: Vec<StoredRun> = Vec::new();
        for &slot in slots {
            let Some((header, root)) = self.host.header(slot).zip(self.host.root(slot)) else { continue };
            let SlotHeader { name, parent, tokens, .. } = header;
            match runs.last_mut().filter(|run| parent.is_some() && run.names.last() == parent.as_ref()) {
                Some(run) => {
                    run.names.push(name);
                    run.tokens.extend(tokens);
                    run.images.push(None);
                }
                // Blocks with images are not copied.
                None => runs.push(StoredRun { medium, root, parent, names: vec![name], tokens, images: vec![None] }),
            }
        }
        runs.into_iter().for_each(|run| self.pool.log_change(KvChange::Stored(run)));
    }

    /// Logs that blocks are no longer in a medium.
    pub(super) fn tell_removed(&self, medium: Medium, names: Vec<ContentName>) {
        if !names.is_empty() && self.pool.is_watched() {
            self.pool.log_change(KvChange::Removed { medium, names });
        }
    }
}
