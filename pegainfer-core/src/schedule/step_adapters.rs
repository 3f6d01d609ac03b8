//! The adapters of a step's rows.

use crate::adapter::Adapter;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Slot of a row without an adapter.
pub const NO_ADAPTER: u32 = u32::MAX;

/// The adapters of a step's rows. Empty if no row has one: the step then runs as in an engine without adapters.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepAdapters {
    /// Slot of each row's adapter, or [`NO_ADAPTER`], `[B]`; empty if no row has one.
    pub rows: Vec<u32>,
    /// The slots that rows use, and the adapter that each of them has to hold. The executor loads those that its slots do
    /// not hold yet.
    pub held: Vec<(u32, Arc<Adapter>)>,
}

impl StepAdapters {
    /// True if no row has an adapter.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Gives row `row`, after all rows so far, the adapter in this slot.
    pub(super) fn add(&mut self, row: usize, slot: u32, adapter: &Arc<Adapter>) {
        self.rows.resize(row, NO_ADAPTER);
        self.rows.push(slot);
        if self.held.iter().all(|(held, _)| *held != slot) {
            self.held.push((slot, adapter.clone()));
        }
    }

    /// Adds rows without adapters, up to `rows` rows.
    pub(super) fn pad(&mut self, rows: usize) {
        if !self.is_empty() {
            self.rows.resize(rows, NO_ADAPTER);
        }
    }

    /// Removes all, but keeps allocated memory.
    pub(super) fn clear(&mut self) {
        self.rows.clear();
        self.held.clear();
    }
}

impl Hash for StepAdapters {
    /// Adds nothing for a step without adapters.
    fn hash<H: Hasher>(&self, state: &mut H) {
        if !self.is_empty() {
            self.rows.hash(state);
            self.held.iter().for_each(|(slot, adapter)| (slot, adapter.id()).hash(state));
        }
    }
}
