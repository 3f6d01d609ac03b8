//! Running sequences yield to waiting requests of other tenants when no more can be admitted.
//!
//! - The group or tenant with the most running sequences yields its youngest to one that runs at least two fewer, at
//!   once. A plan makes as many of these yields as its step has tokens for, because each plan with a yield waits for
//!   the steps in flight.
//! - A sequence yields after a quantum of generated tokens to a tenant that runs nothing. A hundred tenants with long
//!   sequences are served in turn, and the next tenant need not wait until a sequence ends.
//!
//! A sequence that yields recomputes its tokens later. Usually that is only the last block, because the rest is in the
//! prefix cache; otherwise it costs prefill. Yields after a quantum and yields for lack of KV blocks are therefore
//! spaced by their possible cost: they take a bounded part of the steps, and none if no other tenant waits. Each yield
//! after a quantum follows a quantum of new tokens, so all sequences end.
//! after a quantum follows a quantum of new tokens, so all sequences end.

use super::Scheduler;
use super::shares::{HEAD_START, QUANTUM, RECOMPUTED_PER_STEP, Shares};
use crate::schedule::sequence::Sequence;
use crate::schedule::state::SequenceState;
use crate::schedule::turns::{self, group};
use std::cmp::Reverse;
use std::collections::HashMap;

/// A waiting request that takes the slot of a running sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Yield {
    /// Queue position of the request.
    waiting: usize,
    /// Position of the running sequence.
    victim: usize,
    /// True if the victim has used its quantum.
    after_quantum: bool,
}

impl<S: SequenceState> Scheduler<S> {
    /// The yield that is due, if no more can be admitted and another tenant waits.
    pub(super) fn due_yield(&self) -> Option<Yield> {
        let full = self.running.len() >= self.config.max_num_seqs;
        let (first, may_yield) = (self.running.first()?, self.stats.steps >= self.yielding.not_before);
        if self.waiting.is_empty() || !(full || (self.yielding.blocked && may_yield)) {
            return None;
        }
        let others = || self.running.iter().chain(self.waiting.iter().map(Box::as_ref));
        if others().all(|seq| seq.request.tenant == first.request.tenant)
            || self.running.iter().any(Sequence::is_finished)
        {
            return None;
        }
        self.unfair_share(0).or_else(|| self.end_of_quantum().filter(|_| may_yield))
    }

    /// A waiting request and the running sequence that it replaces. The request's group runs at least two sequences
    /// fewer than the group of the sequence, or its tenant does within the same group. Among these, the request whose
    /// group and tenant run the fewest goes first. The first `next` requests of the queue count as running.
    fn unfair_share(&self, next: usize) -> Option<Yield> {
        let shares = Shares::of(self.running.iter(), self.waiting.iter().take(next).map(Box::as_ref));
        let (most, (_, of)) = shares.groups.iter().map(|(group, share)| (share.0, (share.1, *group))).max()?;
        let largest = shares.largest_of(of).1;
        let mut within = HashMap::new();
        let due = self.admissible().filter(|(place, _)| *place >= next).filter_map(|(waiting, seq)| {
            let tenant = seq.request.tenant;
            let victim = if shares.group(tenant) + 2 <= most {
                largest
            } else {
                let (count, youngest) =
                    *within.entry(group(tenant)).or_insert_with(|| shares.largest_of(group(tenant)));
                youngest.filter(|_| shares.tenant(tenant) + 2 <= count)
            }?;
            let allowed = seq.request.priority <= self.running[victim].request.priority;
            let served = (seq.request.priority, shares.group(tenant), shares.tenant(tenant), waiting);
            allowed.then_some((served, Yield { waiting, victim, after_quantum: false }))
        });
        due.min_by_key(|(served, _)| *served).map(|(_, due)| due)
    }

    /// The waiting request of the tenant that runs nothing and has waited longest, and the sequence that it replaces,
    /// which has used its quantum and belongs to the tenant that runs the most.
    fn end_of_quantum(&self) -> Option<Yield> {
        let shares = Shares::of(self.running.iter(), std::iter::empty());
        let has_run = |seq: &&Sequence<S::Slot>| {
            // If memory is short, a sequence that yields loses its computed blocks.
            let quantum = if self.yielding.blocked { QUANTUM.max(seq.len() / 8) } else { QUANTUM };
            seq.run_length() >= quantum
        };
        let share = |seq: &Sequence<S::Slot>| {
            let tenant = seq.request.tenant;
            (seq.request.priority, shares.group(tenant), shares.tenant(tenant), seq.run_length())
        };
        let candidates = self.running.iter().enumerate().filter(|(_, seq)| has_run(seq));
        let (victim, seq) = candidates.max_by_key(|(place, seq)| (share(seq), Reverse(*place)))?;
        let idle = self.admissible().filter(|(_, other)| {
            shares.tenant(other.request.tenant) == 0 && other.request.priority <= seq.request.priority
        });
        let (waiting, _) = idle.min_by_key(|(place, other)| (other.request.priority, other.served, *place))?;
        Some(Yield { waiting, victim, after_quantum: true })
    }

    /// Makes the `first` yield, and after a yield for an unfair share all others that are due. Their requests are
    /// admitted next, as far as one step has tokens for them.
    pub(super) fn give_way(&mut self, first: Yield) {
        let (mut next, mut tokens, mut due) = (0, 0, Some(first));
        while let Some(exchange) = due {
            tokens += self.waiting.get(exchange.waiting).map_or(0, |seq| seq.remaining());
            self.exchange(exchange, next);
            if self.yielding.blocked {
                self.make_room(next);
            }
            next += 1;
            // Blocks of one sequence may be enough for all waiting requests.
            let may_repeat = !exchange.after_quantum && !self.yielding.blocked;
            let goes_on = may_repeat && tokens < self.config.max_num_batched_tokens;
            due = if goes_on { self.unfair_share(next) } else { None };
        }
    }

    /// Preempts further sequences for the request at place `next` of the queue, if others run far more than its group,
    /// until the pool has blocks for it. Otherwise the running sequences grow into each victim's blocks until one ends.
    fn make_room(&mut self, next: usize) {
        let lacks = |all: &Self| all.waiting.get(next).is_some_and(|seq| all.is_preempted_last(seq) && !all.fits(seq));
        while lacks(self) {
            let Some(due) = self.unfair_share(next).filter(|due| due.waiting == next) else { return };
            let victim = self.preempt(due.victim);
            self.yielding.not_before += (victim.len() / RECOMPUTED_PER_STEP) as u64;
            self.waiting.insert(next + 1, victim);
        }
    }

    /// True if growth preempts sequences of another group before this request, once it runs: see
    /// [`growth_victim`](Self::growth_victim).
    fn is_preempted_last(&self, request: &Sequence<S::Slot>) -> bool {
        let shares = Shares::of(self.running.iter(), std::iter::empty());
        let max_share = shares.groups.values().map(|share| share.0).max().unwrap_or(0);
        shares.group(request.request.tenant) + 1 + 2 <= max_share
    }

    /// True if the pool has blocks for all known tokens of the request and for growth: one block for each running
    /// sequence, because a request that is preempted in the next step wastes its prefill. For one that is preempted last,
    /// the blocks that the next step takes are enough.
    pub(super) fn fits(&self, request: &Sequence<S::Slot>) -> bool {
        let blocks = request.table.missing(request.tokens.len());
        let (running, available) = (self.running.len(), self.pool.available());
        let next_step = running.div_ceil(self.pool.block_tokens());
        blocks + running <= available || (blocks + next_step <= available && self.is_preempted_last(request))
    }

    /// Place of the sequence that gives its blocks to the older one at place `of`: the youngest, or that of the group
    /// with the most sequences, if the youngest one's group runs at least two fewer.
    pub(super) fn growth_victim(&self, of: usize) -> usize {
        let youngest = self.running.len() - 1;
        let shares = Shares::of(self.running.iter(), std::iter::empty());
        let largest = shares.groups.iter().map(|(group, share)| (share.0, (share.1, *group))).max();
        let own = shares.group(self.running[youngest].request.tenant);
        let larger = largest.filter(|(most, _)| own + 2 <= *most);
        let place = larger.and_then(|(_, (_, group))| shares.largest_of(group).1);
        place.filter(|place| *place > of).unwrap_or(youngest)
    }

    /// Preempts the running sequence for the waiting request, which is admitted after the first `next` of the queue.
    fn exchange(&mut self, due: Yield, next: usize) {
        let Some(request) = self.waiting.remove(due.waiting) else { return };
        let victim = self.preempt(due.victim);
        if due.after_quantum || self.yielding.blocked {
            self.yielding.not_before = self.stats.steps + (victim.len() / RECOMPUTED_PER_STEP) as u64;
        }
        if due.after_quantum {
            self.wait_for_turn(victim);
        } else {
            self.waiting.insert(next, victim);
        }
        self.waiting.insert(next, request);
    }

    /// Takes a sequence, and its blocks, from the running ones.
    pub(super) fn preempt(&mut self, place: usize) -> Box<Sequence<S::Slot>> {
        let mut victim = self.running.remove(place);
        victim.release();
        self.stats.preemptions += 1;
        victim
    }

    /// A sequence that has had its quantum waits like those that never ran.
    fn wait_for_turn(&mut self, mut victim: Box<Sequence<S::Slot>>) {
        let (priority, tenant) = (victim.request.priority, victim.request.tenant);
        victim.has_yielded = true;
        victim.turn = self.turns.arrive(priority, group(tenant));
        turns::enter(&mut self.waiting, victim);
        // The tenant was served until now, whichever of its requests goes next.
        let served = self.stats.steps + HEAD_START;
        let own = self.waiting.iter_mut().filter(|seq| seq.request.tenant == tenant);
        own.for_each(|seq| seq.served = seq.served.max(served));
    }
}
