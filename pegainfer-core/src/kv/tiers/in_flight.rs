//! Transfers until they are done.

use super::rates::Work;
use super::transfer::BlockCopy;
use crate::kv::pool::HeldBlocks;
use crate::kv::{BlockTable, ContentName};

/// A transfer until it is done.
#[derive(Debug)]
pub(super) enum InFlight<K> {
    /// The device's blocks, and the host's slots.
    Store {
        held: HeldBlocks,
        slots: Vec<u32>,
    },
    /// The device's states, and the host's slots.
    StoreStates {
        held: Vec<K>,
        slots: Vec<u32>,
    },
    Load(Load<K>),
    /// Slots of the host and of the disk.
    Write {
        copies: Vec<BlockCopy>,
    },
    /// Slots of the host and of the disk for states.
    WriteStates {
        copies: Vec<BlockCopy>,
    },
    Read(Read),
    /// Slots of the disk.
    Erase {
        slots: Vec<u32>,
    },
    /// Slots of the disk for states.
    EraseStates {
        slots: Vec<u32>,
    },
}

/// Blocks on their way to the device.
#[derive(Debug)]
pub(super) struct Load<K> {
    /// Holds the blocks before and the blocks that are loaded.
    pub table: BlockTable,
    /// Tokens of all of them.
    pub tokens: Vec<u32>,
    /// Number of blocks before.
    pub before: usize,
    /// Name of the first one loaded, or of the block after the loaded state.
    pub first: Option<ContentName>,
    pub slots: Vec<u32>,
    /// The state after the last of them, and its slot of the host.
    pub state: Option<(K, u32)>,
    /// Number of blocks that take as long as all of it.
    pub work: usize,
    /// True if the prefix cache was cleared meanwhile.
    pub forgotten: bool,
}

/// Blocks and a state on their way from the disk to the host.
#[derive(Debug)]
pub(super) struct Read {
    pub blocks: Vec<BlockCopy>,
    pub states: Vec<BlockCopy>,
    /// Name of the block that other requests need next if they wait for this transfer.
    pub first: Option<ContentName>,
    /// Number of blocks that take as long as all of it.
    pub work: usize,
}

/// What a load has brought to the device.
#[derive(Debug)]
pub struct Loaded<K> {
    /// Holds the blocks that were loaded and those before them, as far as their bytes are right.
    pub table: BlockTable,
    /// The state after the last of them, if one was loaded.
    pub state: Option<K>,
}

/// Pins of a transfer in each of the indexes.
#[derive(Debug, Default)]
pub(super) struct Pins {
    pub host: usize,
    pub disk: usize,
    pub host_states: usize,
    pub disk_states: usize,
}

impl<K> InFlight<K> {
    /// Blocks that are still to be loaded and read.
    pub fn work(&self) -> Work {
        match self {
            Self::Load(load) => Work { load: load.work, read: 0 },
            Self::Read(read) => Work { load: 0, read: read.work },
            _ => Work::default(),
        }
    }

    /// True if it brings the block of this name as its first one.
    pub fn brings(&self, name: ContentName) -> bool {
        match self {
            Self::Load(Load { first, .. }) | Self::Read(Read { first, .. }) => *first == Some(name),
            _ => false,
        }
    }

    /// Blocks of the pool that it holds.
    pub fn held_blocks(&self) -> Vec<u32> {
        match self {
            Self::Store { held, .. } => held.blocks().to_vec(),
            Self::Load(load) => load.table.blocks().iter().collect(),
            _ => Vec::new(),
        }
    }

    /// Slots that it keeps from being evicted.
    pub fn pins(&self) -> Pins {
        let none = Pins::default();
        match self {
            Self::Store { slots, .. } => Pins { host: slots.len(), ..none },
            Self::StoreStates { slots, .. } => Pins { host_states: slots.len(), ..none },
            Self::Load(load) => Pins { host: load.slots.len(), host_states: load.state.iter().len(), ..none },
            Self::Write { copies } => Pins { host: copies.len(), disk: copies.len(), ..none },
            Self::WriteStates { copies } => Pins { host_states: copies.len(), disk_states: copies.len(), ..none },
            Self::Read(Read { blocks, states, .. }) => {
                let (blocks, states) = (blocks.len(), states.len());
                Pins { host: blocks, disk: blocks, host_states: states, disk_states: states }
            }
            Self::Erase { slots } => Pins { disk: slots.len(), ..none },
            Self::EraseStates { slots } => Pins { disk_states: slots.len(), ..none },
        }
    }
}
