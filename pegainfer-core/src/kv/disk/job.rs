//! One job of the store as a sequence of transfers.
//!
//! Saving a block takes three transfers, each begun after the one before it has completed: the slot's header becomes
//! zeros, the payload is written, the new header is written. If the process dies at any time, the slot is either empty
//! or has a header of exactly its payload.

use super::format::{Geometry, PAGE};
use super::memory::SlotMemory;
use std::io::{Error, ErrorKind, Result};
use std::time::Instant;

/// Bytes that one system call may transfer.
const MAX_TRANSFER: usize = 1 << 30;
/// The header of an empty slot.
static EMPTY: [u8; PAGE] = [0; PAGE];

/// What is to be done with a slot.
#[derive(Debug)]
pub(super) enum Task<M> {
    /// Read the payload.
    Read(M),
    /// Save a block: the payload and the encoded header.
    Write(M, Vec<u8>),
    /// Make the slot empty.
    Erase,
}

/// A job and how far it is.
#[derive(Debug)]
pub(super) struct Job<M> {
    pub ticket: u64,
    pub slot: u32,
    pub task: Task<M>,
    /// When the caller submitted it.
    pub submitted: Instant,
    stage: Stage,
    /// Bytes of the stage that are done.
    moved: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Erase,
    Payload,
    Header,
}

/// The bytes that the next system call transfers. They stay where they are until the job is advanced or dropped.
#[derive(Debug, Clone, Copy)]
pub(super) struct Transfer {
    /// True to write into the file, false to read from it.
    pub write: bool,
    /// True if offset, address and length suit direct I/O.
    pub direct: bool,
    /// Position in the file.
    pub offset: u64,
    pub start: *mut u8,
    pub len: usize,
}

/// What is left of a job after a transfer.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Another transfer.
    More,
    /// Nothing: it succeeded or failed.
    Finished(Result<()>),
}

impl<M: SlotMemory> Job<M> {
    /// A job that nobody has begun. Its memory has as many bytes as a slot.
    pub fn new(ticket: u64, slot: u32, task: Task<M>) -> Self {
        let stage = if matches!(task, Task::Read(_)) { Stage::Payload } else { Stage::Erase };
        Self { ticket, slot, task, submitted: Instant::now(), stage, moved: 0 }
    }

    /// True if it reads.
    pub fn is_read(&self) -> bool {
        matches!(self.task, Task::Read(_))
    }

    /// Name of the task in messages.
    pub fn operation(&self) -> &'static str {
        match self.task {
            Task::Read(_) => "read",
            Task::Write(..) => "write",
            Task::Erase => "erase",
        }
    }

    /// The next transfer of an unfinished job.
    pub fn transfer(&self, geometry: &Geometry) -> Transfer {
        let (start, len) = self.stage_bytes(geometry);
        let offset = match self.stage {
            Stage::Payload => geometry.payload_offset(self.slot),
            Stage::Erase | Stage::Header => geometry.header_offset(self.slot),
        };
        let offset = offset + self.moved as u64;
        let start = start.wrapping_add(self.moved);
        let len = (len - self.moved).min(MAX_TRANSFER);
        let aligned = [start.addr(), len, self.moved].iter().all(|n| n.is_multiple_of(PAGE));
        let direct = aligned && self.stage == Stage::Payload;
        Transfer { write: !self.is_read(), direct, offset, start, len }
    }

    /// Takes note of a transfer's result: the number of bytes, or an error.
    pub fn advance(&mut self, geometry: &Geometry, result: Result<usize>) -> Outcome {
        match result {
            Ok(0) if self.is_read() => return Outcome::Finished(Err(ErrorKind::UnexpectedEof.into())),
            Ok(0) => return Outcome::Finished(Err(ErrorKind::WriteZero.into())),
            Ok(bytes) => self.moved += bytes,
            Err(error) if error.kind() == ErrorKind::Interrupted => return Outcome::More,
            Err(error) => return Outcome::Finished(Err(error)),
        }
        let (_, len) = self.stage_bytes(geometry);
        if self.moved > len {
            return Outcome::Finished(Err(Error::other("more bytes were transferred than asked for")));
        }
        if self.moved < len {
            return Outcome::More;
        }
        self.moved = 0;
        self.stage = match (&self.task, self.stage) {
            (Task::Write(..), Stage::Erase) => Stage::Payload,
            (Task::Write(..), Stage::Payload) => Stage::Header,
            _ => return Outcome::Finished(Ok(())),
        };
        Outcome::More
    }

    /// Memory of the current stage.
    fn stage_bytes(&self, geometry: &Geometry) -> (*mut u8, usize) {
        match (self.stage, &self.task) {
            (Stage::Payload, Task::Read(memory) | Task::Write(memory, _)) => (memory.start(), memory.len()),
            (Stage::Header, Task::Write(_, header)) => (header.as_ptr().cast_mut(), header.len()),
            // Only written from.
            _ => (EMPTY.as_ptr().cast_mut(), geometry.header_bytes),
        }
    }

    /// The memory that the caller lent.
    pub fn into_memory(self) -> Option<M> {
        match self.task {
            Task::Read(memory) | Task::Write(memory, _) => Some(memory),
            Task::Erase => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::AlignedMemory;
    use super::*;

    const GEOMETRY: Geometry = Geometry { slot_bytes: 8192, header_bytes: 256, slots: 4 };

    fn write() -> Job<AlignedMemory> {
        Job::new(1, 3, Task::Write(AlignedMemory::zeroed(8192), vec![1; 100]))
    }

    /// Offset and length of all transfers of a job when each moves at most `most` bytes.
    fn transfers(mut job: Job<AlignedMemory>, most: usize) -> Vec<(u64, usize, bool)> {
        let mut all = Vec::new();
        loop {
            let Transfer { offset, len, direct, .. } = job.transfer(&GEOMETRY);
            all.push((offset, len, direct));
            match job.advance(&GEOMETRY, Ok(len.min(most))) {
                Outcome::More => {}
                Outcome::Finished(result) => {
                    result.unwrap();
                    return all;
                }
            }
        }
    }

    #[test]
    fn a_block_is_saved_by_empty_header_payload_and_header() {
        let payload = GEOMETRY.payload_offset(3);
        assert_eq!(transfers(write(), usize::MAX), [(4864, 256, false), (payload, 8192, true), (4864, 100, false)]);
        assert_eq!(transfers(Job::new(1, 3, Task::Erase), usize::MAX), [(4864, 256, false)]);
        let read = Job::new(1, 3, Task::Read(AlignedMemory::zeroed(8192)));
        assert_eq!(transfers(read, usize::MAX), [(payload, 8192, true)]);
    }

    #[test]
    fn short_transfers_go_on_where_they_ended() {
        let read = || Job::new(1, 0, Task::Read(AlignedMemory::zeroed(8192)));
        let first = GEOMETRY.payload_offset(0);
        assert_eq!(transfers(read(), 4096), [(first, 8192, true), (first + 4096, 4096, true)]);
        let odd = transfers(read(), 5000);
        assert_eq!(odd, [(first, 8192, true), (first + 5000, 3192, false)], "the rest is not aligned");
    }

    #[test]
    fn interrupted_calls_are_repeated_and_others_fail() {
        let mut job = write();
        assert!(matches!(job.advance(&GEOMETRY, Err(ErrorKind::Interrupted.into())), Outcome::More));
        assert_eq!(job.transfer(&GEOMETRY).len, 256);
        let failed = |outcome| matches!(outcome, Outcome::Finished(Err(_)));
        assert!(failed(write().advance(&GEOMETRY, Ok(0))));
        assert!(failed(write().advance(&GEOMETRY, Ok(257))));
        assert!(failed(write().advance(&GEOMETRY, Err(ErrorKind::StorageFull.into()))));
    }

    #[test]
    fn odd_memory_is_transferred_through_the_page_cache() {
        let geometry = Geometry { slot_bytes: 5000, ..GEOMETRY };
        let job = Job::new(1, 0, Task::Read(AlignedMemory::zeroed(5000)));
        assert!(!job.transfer(&geometry).direct);
    }
}
