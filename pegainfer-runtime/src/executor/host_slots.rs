//! Slots of host memory for KV blocks, or states, of one rank.

use pegainfer_core::kv::tiers::{BlockCopy, Checksum, Direction};
use pegainfer_core::tensor::Tensor;

/// Host memory with slots for rows of tensors: a row of each of them, one after the other.
#[derive(Debug)]
pub(super) struct HostSlots {
    /// `[slots, slot_bytes]`; pages take memory when they are first written.
    memory: Vec<u8>,
    slot_bytes: usize,
}

impl HostSlots {
    /// `slots` slots for the rows of `tensors`. `None` if there is no address space for them.
    pub fn new(tensors: &[&mut Tensor], slots: usize) -> Option<Self> {
        let slot_bytes = slot_bytes(tensors);
        let bytes = slots.checked_mul(slot_bytes)?;
        let mut memory = Vec::new();
        memory.try_reserve_exact(bytes).ok()?;
        memory.resize(bytes, 0);
        Some(Self { memory, slot_bytes })
    }

    /// The bytes of a slot.
    pub fn slot(&mut self, slot: u32) -> &mut [u8] {
        &mut self.memory[slot as usize * self.slot_bytes..][..self.slot_bytes]
    }

    /// Copies a row of each tensor, and returns the checksum of their bytes.
    pub fn copy(&mut self, direction: Direction, copy: BlockCopy, tensors: &mut [&mut Tensor]) -> u64 {
        let slot = self.slot(copy.slot);
        let (mut checksum, mut at) = (Checksum::default(), 0);
        for tensor in tensors {
            let bytes = row_bytes(tensor);
            let part = &mut slot[at..at + bytes];
            let first = copy.block as usize * bytes;
            match direction {
                Direction::Store => part.copy_from_slice(&tensor.host_storage()[first..][..bytes]),
                _ => tensor.host_storage_mut()[first..][..bytes].copy_from_slice(part),
            }
            checksum.add(part);
            at += bytes;
        }
        checksum.sum()
    }
}

/// Bytes of a row of each of `tensors`.
pub(super) fn slot_bytes(tensors: &[&mut Tensor]) -> usize {
    tensors.iter().map(|tensor| row_bytes(tensor)).sum()
}

fn row_bytes(tensor: &Tensor) -> usize {
    tensor.rows_cols().1 * tensor.dtype().size()
}
