//! Decides which request gets permits next. It has no clock and no threads, so that tests and a fuzzer can drive it.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// Bounds of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueLimits {
    /// Number of permits for all tenants together.
    pub permits: usize,
    /// Maximum number of permits of one tenant; the rest stays free for others. A tenant without permits may exceed
    /// this with one request, up to all permits.
    pub permits_per_tenant: usize,
    /// Maximum number of waiting requests of all tenants.
    pub waiting: usize,
    /// Maximum number of waiting requests of one tenant.
    pub waiting_per_tenant: usize,
}

/// Default maximum of waiting requests of all tenants, more than the maximum of connections.
const WAITING: usize = 1 << 16;
/// Default maximum of waiting requests of one tenant. Waiting requests hold little memory. Waiting clients send
/// nothing, while refused clients usually retry immediately.
const WAITING_PER_TENANT: usize = 4096;

impl QueueLimits {
    /// Limits with this number of permits and the default bounds of waiting requests.
    pub const fn new(permits: usize, permits_per_tenant: usize) -> Self {
        Self { permits, permits_per_tenant, waiting: WAITING, waiting_per_tenant: WAITING_PER_TENANT }
    }
}

/// Outcome of asking for permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// The tenant holds the permits now.
    Granted,
    /// The request waits; [`FairQueue::grant_next`] returns this ticket when its turn comes.
    Waits(Ticket),
}

/// A waiting request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// The queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueFull {
    /// Too many requests of this tenant wait.
    Tenant,
    /// Too many requests of all tenants wait.
    Total,
}

/// A queue in which tenants take turns: first come, first served within a tenant, round robin over groups of tenants
/// and over the tenants of each group.
///
/// The next request waits until enough permits are free. Nobody overtakes it, so a request for many permits does not
/// starve. A tenant at its maximum is skipped and keeps its place in the order.
#[derive(Debug)]
pub struct FairQueue<K> {
    limits: QueueLimits,
    free: usize,
    held: HashMap<K, usize>,
    /// Waiting requests of each tenant; no queue is empty.
    queues: HashMap<K, VecDeque<Waiter>>,
    /// The group of a tenant.
    group: fn(&K) -> u64,
    /// Tenants of each group with waiting requests, in the order of their turns; no list is empty.
    members: HashMap<u64, VecDeque<K>>,
    /// Groups with waiting requests, in the order of their turns.
    turns: VecDeque<u64>,
    waiting: usize,
    last_ticket: u64,
}

#[derive(Debug)]
struct Waiter {
    ticket: Ticket,
    permits: usize,
}

/// A tenant that may take the permits of its next request.
struct Eligible {
    /// Place of its group in the order of groups.
    group: usize,
    /// Its place in the order of the group.
    tenant: usize,
    permits: usize,
}

impl<K: Copy + Eq + Hash> FairQueue<K> {
    /// A queue with all permits free. `group` returns the group of a tenant.
    pub fn new(limits: QueueLimits, group: fn(&K) -> u64) -> Self {
        let (held, queues, members) = (HashMap::new(), HashMap::new(), HashMap::new());
        let (free, turns) = (limits.permits, VecDeque::new());
        Self { limits, free, held, queues, group, members, turns, waiting: 0, last_ticket: 0 }
    }

    /// Asks for `permits` permits, at most all of them.
    ///
    /// # Errors
    /// The request would have to wait, and too many requests wait already.
    pub fn enter(&mut self, tenant: K, permits: usize) -> Result<Entry, QueueFull> {
        let permits = permits.min(self.limits.permits);
        let own = self.queues.get(&tenant).map_or(0, VecDeque::len);
        if own == 0 && self.may_hold(&tenant, permits) && self.free >= permits && self.nobody_is_next() {
            self.take(tenant, permits);
            return Ok(Entry::Granted);
        }
        if own >= self.limits.waiting_per_tenant {
            return Err(QueueFull::Tenant);
        }
        if self.waiting >= self.limits.waiting {
            return Err(QueueFull::Total);
        }
        self.last_ticket += 1;
        let ticket = Ticket(self.last_ticket);
        self.queues.entry(tenant).or_default().push_back(Waiter { ticket, permits });
        if own == 0 {
            self.add_turn(tenant);
        }
        self.waiting += 1;
        Ok(Entry::Waits(ticket))
    }

    /// Removes a waiting request; does nothing if it no longer waits. This may make other requests eligible.
    pub fn leave(&mut self, tenant: K, ticket: Ticket) {
        let Some(queue) = self.queues.get_mut(&tenant) else { return };
        let Some(at) = queue.iter().position(|waiter| waiter.ticket == ticket) else { return };
        queue.remove(at);
        self.waiting -= 1;
        if queue.is_empty() {
            self.queues.remove(&tenant);
            let group = (self.group)(&tenant);
            if let Some(members) = self.members.get_mut(&group) {
                members.retain(|other| *other != tenant);
                if members.is_empty() {
                    self.members.remove(&group);
                    self.turns.retain(|other| *other != group);
                }
            }
        }
    }

    /// Gives back permits of a tenant. This may make other requests eligible.
    pub fn release(&mut self, tenant: K, permits: usize) {
        let Some(held) = self.held.get_mut(&tenant) else { return };
        let permits = permits.min(*held);
        *held -= permits;
        if *held == 0 {
            self.held.remove(&tenant);
        }
        self.free += permits;
    }

    /// Gives permits to the next request in turn; `None` if it has to wait. Returns its tenant, ticket and permits.
    /// Call it after each change until it returns `None`.
    pub fn grant_next(&mut self) -> Option<(K, Ticket, usize)> {
        let Eligible { group: at, tenant: member, permits } =
            self.first_eligible().filter(|e| e.permits <= self.free)?;
        let group = self.turns.remove(at)?;
        let members = self.members.get_mut(&group)?;
        let tenant = members.remove(member)?;
        if members.is_empty() {
            self.members.remove(&group);
        } else {
            self.turns.push_back(group);
        }
        let queue = self.queues.get_mut(&tenant)?;
        let Waiter { ticket, .. } = queue.pop_front()?;
        if queue.is_empty() {
            self.queues.remove(&tenant);
        } else {
            self.add_turn(tenant);
        }
        self.waiting -= 1;
        self.take(tenant, permits);
        Some((tenant, ticket, permits))
    }

    /// Number of free permits.
    pub fn free(&self) -> usize {
        self.free
    }

    /// Number of permits of a tenant.
    pub fn held(&self, tenant: &K) -> usize {
        self.held.get(tenant).copied().unwrap_or(0)
    }

    /// Number of waiting requests of all tenants.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// True if a tenant may hold `permits` more.
    pub fn may_hold(&self, tenant: &K, permits: usize) -> bool {
        let held = self.held(tenant);
        held == 0 || held + permits <= self.limits.permits_per_tenant
    }

    /// Puts a tenant with waiting requests last in its group. A group that had none becomes the last group.
    fn add_turn(&mut self, tenant: K) {
        let group = (self.group)(&tenant);
        let members = self.members.entry(group).or_default();
        if members.is_empty() && !self.turns.contains(&group) {
            self.turns.push_back(group);
        }
        members.push_back(tenant);
    }

    /// The first tenant in turn that may take the permits of its next request.
    fn first_eligible(&self) -> Option<Eligible> {
        self.turns.iter().enumerate().find_map(|(group, id)| {
            self.members.get(id)?.iter().enumerate().find_map(|(tenant, key)| {
                let permits = self.queues.get(key)?.front()?.permits;
                self.may_hold(key, permits).then_some(Eligible { group, tenant, permits })
            })
        })
    }

    fn nobody_is_next(&self) -> bool {
        self.first_eligible().is_none()
    }

    fn take(&mut self, tenant: K, permits: usize) {
        self.free -= permits;
        if permits > 0 {
            *self.held.entry(tenant).or_default() += permits;
        }
    }
}
