//! Host memory of a rank for KV blocks and states, on every device.

use super::device_copies::DeviceCopies;
use super::host_slots::HostSlots;
use crate::model::KeptTensors;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::kv::disk::SlotKind;
use pegainfer_core::kv::tiers::{BlockCopy, Direction, TransferId};
use pegainfer_core::tensor::OpError;
use std::collections::HashMap;
use std::time::Duration;

/// Slots for blocks and for states, and the copies in flight.
#[derive(Debug)]
pub(super) enum HostTier {
    /// Copied by the CPU; the checksums of transfers so far.
    Host([HostSlots; 2], HashMap<TransferId, Vec<u64>>),
    /// Copied by a GPU, beside its steps.
    Device(Box<DeviceCopies>),
}

impl HostTier {
    /// Host memory for so many blocks and states.
    pub fn new(exec: &mut Exec, tensors: &KeptTensors<'_>, [blocks, states]: [usize; 2]) -> Result<Self, OpError> {
        if exec.device() == Device::Cuda {
            let kinds = [(&tensors.blocks[..], blocks), (&tensors.states[..], states)];
            return Ok(Self::Device(Box::new(DeviceCopies::new(exec, kinds)?)));
        }
        let slots = HostSlots::new(&tensors.blocks, blocks).zip(HostSlots::new(&tensors.states, states));
        let no_memory = || OpError { op: "host tier", message: "the host has no memory for it".to_owned() };
        Ok(Self::Host(slots.map(<[HostSlots; 2]>::from).ok_or_else(no_memory)?, HashMap::new()))
    }

    /// The bytes of a slot.
    pub fn slot(&mut self, kind: SlotKind, slot: u32) -> &mut [u8] {
        match self {
            Self::Host(kinds, _) => kinds[kind as usize].slot(slot),
            Self::Device(copies) => copies.slot(kind, slot),
        }
    }

    /// Number of blocks that can begin now, if these and these states are the next ones.
    pub fn capacity(&self, copies: [&[BlockCopy]; 2]) -> usize {
        match self {
            Self::Host(..) => usize::MAX,
            Self::Device(device) if device.can_begin(copies) => device.capacity(),
            Self::Device(_) => 0,
        }
    }

    /// Begins to copy these blocks and states of a transfer; `ends`: they are the last ones. After an error,
    /// [`give_up`](Self::give_up) must follow.
    pub fn begin(
        &mut self,
        exec: &mut Exec,
        (id, direction): (TransferId, Direction),
        [blocks, states]: [&[BlockCopy]; 2],
        mut tensors: KeptTensors<'_>,
        ends: bool,
    ) -> Result<(), OpError> {
        match self {
            Self::Host([block_slots, state_slots], sums) => {
                let sums = sums.entry(id).or_default();
                sums.extend(blocks.iter().map(|copy| block_slots.copy(direction, *copy, &mut tensors.blocks)));
                sums.extend(states.iter().map(|copy| state_slots.copy(direction, *copy, &mut tensors.states)));
                Ok(())
            }
            Self::Device(copies) => copies.begin(exec, (id, direction), [blocks, states], ends),
        }
    }

    /// Ends a transfer, once nothing is copied any more.
    pub fn give_up(&mut self, exec: &mut Exec, id: TransferId) -> Result<(), OpError> {
        match self {
            Self::Host(_, sums) => {
                sums.remove(&id);
                Ok(())
            }
            Self::Device(copies) => copies.give_up(exec, id),
        }
    }

    /// True once a transfer, all of which has begun, is done.
    pub fn is_done(&self, id: TransferId) -> Result<bool, OpError> {
        match self {
            Self::Host(..) => Ok(true),
            Self::Device(copies) => copies.is_done(id),
        }
    }

    /// The checksum of each block, and then of each state, of a transfer that is done, and the time that a GPU took.
    pub fn take_sums(&mut self, id: TransferId) -> Result<(Vec<u64>, Option<Duration>), OpError> {
        match self {
            Self::Host(_, sums) => Ok((sums.remove(&id).unwrap_or_default(), None)),
            Self::Device(copies) => copies.take_sums(id),
        }
    }
}
