//! Counters of the tiers.

/// Gauges and counters of the tiers of an engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Slots of the host, and how many hold a block.
    pub host_slots: usize,
    /// Slots of the host with a block.
    pub host_used: usize,
    /// Slots of the disk.
    pub disk_slots: usize,
    /// Slots of the disk with a block.
    pub disk_used: usize,
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Slots of the host for states outside of KV blocks.
    pub state_slots: usize,
    /// Those slots with a state.
    pub state_used: usize,
    /// Slots of the disk for states.
    pub state_disk_slots: usize,
    /// Those slots with a state.
    pub state_disk_used: usize,
    /// Bytes of a state.
    pub state_bytes: usize,
    /// Prompt tokens that were not on the device and were looked up.
    pub queries: u64,
    /// Prompt tokens that were loaded.
    pub hits: u64,
    /// Blocks copied to the host.
    pub stored_blocks: u64,
    /// States copied to the host.
    pub stored_states: u64,
    /// States copied to the device.
    pub loaded_states: u64,
    /// Nanoseconds of those transfers.
    pub store_nanos: u64,
    /// Number of those transfers.
    pub stores: u64,
    /// Blocks copied to the device.
    pub loaded_blocks: u64,
    /// Nanoseconds of those transfers.
    pub load_nanos: u64,
    /// Number of those transfers.
    pub loads: u64,
    /// Blocks written to the disk.
    pub written_blocks: u64,
    /// Blocks read from the disk.
    pub read_blocks: u64,
    /// States written to the disk.
    pub written_states: u64,
    /// States read from the disk.
    pub read_states: u64,
    /// Nanoseconds of transfers that read blocks and states.
    pub read_nanos: u64,
    /// Blocks that were not stored, because they left the pool before their turn or no slot could be evicted.
    pub stores_skipped: u64,
    /// Loads that would have taken longer than computing the tokens.
    pub loads_refused: u64,
    /// Blocks and states whose checksum was wrong.
    pub corrupt_blocks: u64,
    /// Transfers that failed.
    pub failed_transfers: u64,
}

impl TierStats {
    /// The sum of two engines.
    pub fn plus(self, other: Self) -> Self {
        Self {
            host_slots: self.host_slots + other.host_slots,
            host_used: self.host_used + other.host_used,
            disk_slots: self.disk_slots + other.disk_slots,
            disk_used: self.disk_used + other.disk_used,
            slot_bytes: self.slot_bytes.max(other.slot_bytes),
            state_slots: self.state_slots + other.state_slots,
            state_used: self.state_used + other.state_used,
            state_disk_slots: self.state_disk_slots + other.state_disk_slots,
            state_disk_used: self.state_disk_used + other.state_disk_used,
            state_bytes: self.state_bytes.max(other.state_bytes),
            queries: self.queries + other.queries,
            hits: self.hits + other.hits,
            stored_states: self.stored_states + other.stored_states,
            loaded_states: self.loaded_states + other.loaded_states,
            stored_blocks: self.stored_blocks + other.stored_blocks,
            store_nanos: self.store_nanos + other.store_nanos,
            stores: self.stores + other.stores,
            loaded_blocks: self.loaded_blocks + other.loaded_blocks,
            load_nanos: self.load_nanos + other.load_nanos,
            loads: self.loads + other.loads,
            written_blocks: self.written_blocks + other.written_blocks,
            read_blocks: self.read_blocks + other.read_blocks,
            written_states: self.written_states + other.written_states,
            read_states: self.read_states + other.read_states,
            read_nanos: self.read_nanos + other.read_nanos,
            stores_skipped: self.stores_skipped + other.stores_skipped,
            loads_refused: self.loads_refused + other.loads_refused,
            corrupt_blocks: self.corrupt_blocks + other.corrupt_blocks,
            failed_transfers: self.failed_transfers + other.failed_transfers,
        }
    }
}
