//! The states of all names, and who leaves when memory is short.

use super::entry::{Entry, State};
use std::cmp::Reverse;
use std::collections::VecDeque;

/// The states of all names.
pub(super) struct Table {
    pub entries: Vec<Entry>,
    /// Models that wait for memory, in the order of their turns. Only the first one makes others leave, and is loaded.
    pub turns: VecDeque<usize>,
}

/// Memory that a model needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Need {
    /// Bytes of it.
    pub bytes: u64,
    /// Bytes of all models together; `None` if they are unknown.
    pub memory: Option<u64>,
    /// Maximum number of loaded models.
    pub max_loaded: usize,
}

/// What the first model in the queue does next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// It fits.
    Load,
    /// This idle model leaves.
    Evict(usize),
    /// Some of these models in use have to leave, least recently used first, and the idle ones do not suffice.
    Wait(Vec<usize>),
    /// It does not fit even if all others that may leave have left: by so many bytes, or by the number of models.
    Never { missing: Option<u64> },
}

impl Table {
    pub fn new(entries: Vec<Entry>) -> Self {
        Self { entries, turns: VecDeque::new() }
    }

    /// What model `id` with this need does next. Idle models leave only if that makes enough memory free.
    pub fn next(&self, id: usize, need: &Need) -> Next {
        let others = || (0..self.entries.len()).filter(|other| *other != id);
        let held: Vec<usize> = others().filter(|other| self.entries[*other].holds_memory()).collect();
        if need.is_met(self.bytes(&held), held.len()) {
            return Next::Load;
        }
        let staying = |leaves: &dyn Fn(&Entry) -> bool| -> Vec<usize> {
            held.iter().copied().filter(|other| !leaves(&self.entries[*other])).collect()
        };
        let least = staying(&Entry::may_leave);
        let coming = least.iter().any(|other| matches!(self.entries[*other].state, State::Leaving));
        if !coming && !need.is_met(self.bytes(&least), least.len()) {
            return Next::Never { missing: need.missing(self.bytes(&least)) };
        }
        let mut leaving: Vec<usize> = held.iter().copied().filter(|other| self.entries[*other].may_leave()).collect();
        // Most recently used first.
        leaving.sort_by_key(|other| Reverse(self.entries[*other].last_use));
        let busy = staying(&Entry::is_idle);
        if need.is_met(self.bytes(&busy), busy.len())
            && let Some(oldest) = leaving.iter().rev().find(|other| self.entries[**other].is_idle())
        {
            return Next::Evict(*oldest);
        }
        leaving.reverse();
        let mut victims = Vec::new();
        for other in leaving {
            let left: Vec<usize> = held.iter().copied().filter(|held| !victims.contains(held)).collect();
            if need.is_met(self.bytes(&left), left.len()) {
                break;
            }
            victims.push(other);
        }
        Next::Wait(victims)
    }

    fn bytes(&self, ids: &[usize]) -> u64 {
        ids.iter().map(|id| self.entries[*id].bytes).sum()
    }
}

impl Need {
    /// True if it fits next to `loaded` models of `bytes` bytes.
    fn is_met(&self, bytes: u64, loaded: usize) -> bool {
        loaded < self.max_loaded && self.missing(bytes).is_none()
    }

    /// Bytes that are missing next to models of `bytes` bytes.
    fn missing(&self, bytes: u64) -> Option<u64> {
        (bytes + self.bytes).checked_sub(self.memory?).filter(|missing| *missing > 0)
    }
}

impl Entry {
    /// True if its engine is in memory, or is on its way out.
    pub fn holds_memory(&self) -> bool {
        matches!(self.state, State::Loaded(_) | State::Leaving)
    }
}
