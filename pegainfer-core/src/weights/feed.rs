//! Reads the rows that several ranks need once for all of them. Reader threads run ahead of the ranks by a bounded
//! number of chunks, each rank copies its part of every chunk, and the memory of a chunk is reused after the last rank
//! has its part.

#[cfg(test)]
mod tests;

use super::error::{WeightsError, named};
use super::stored::Stored;
use crate::parallel::aborted;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Limits of host memory in use.
#[derive(Debug, Clone, Copy)]
pub(super) struct FeedLimits {
    /// Bytes of a chunk; of at least one row.
    pub chunk_bytes: usize,
    /// Chunks.
    pub chunks: usize,
}

impl FeedLimits {
    /// Half a gigabyte: several experts ahead of the slowest rank.
    pub const DEFAULT: Self = Self { chunk_bytes: 8 << 20, chunks: 64 };
}

/// Some rows of a tensor that several ranks need.
#[derive(Debug)]
pub(super) struct Chunk<'a> {
    /// Name of the tensor.
    pub name: Arc<str>,
    /// All rows of the tensor.
    pub stored: Stored<'a>,
    /// First byte of the chunk.
    pub first: usize,
    /// Bytes of the chunk.
    pub bytes: usize,
    /// Bytes that the ranks copy from it, of all ranks together.
    pub copied: usize,
}

/// The chunks of a checkpoint, in the order in which every rank takes them.
#[derive(Debug)]
pub(super) struct Feed<'a> {
    chunks: Vec<Chunk<'a>>,
    /// Maximum number of chunks in memory.
    limit: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The chunk that is read next.
    next: usize,
    /// Chunks in memory, by number.
    held: BTreeMap<usize, Held>,
    /// Buffers of chunks that every rank has taken.
    spare: Vec<Vec<u8>>,
    /// True if no rank can continue.
    stopped: bool,
    /// The first error.
    failure: Option<WeightsError>,
}

/// A chunk in memory.
#[derive(Debug, Default)]
struct Held {
    /// Bytes of the chunk; `None` while it is read.
    bytes: Option<Arc<Vec<u8>>>,
    /// Bytes that ranks have copied.
    copied: usize,
}

impl<'a> Feed<'a> {
    /// A feed of these chunks, with up to `limit` of them in memory.
    pub fn new(chunks: Vec<Chunk<'a>>, limit: usize) -> Self {
        Self { chunks, limit, state: Mutex::default(), changed: Condvar::new() }
    }

    /// True if there is nothing to read.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Reads chunks until there are none or the feed is stopped. Any number of threads may call it.
    pub fn read(&self) {
        let _guard = StopOnPanic(self);
        while let Some((i, mut buffer)) = self.claim() {
            let read = read_chunk(&self.chunks[i], &mut buffer);
            if let Err(error) = read {
                return self.fail(error);
            }
            if let Some(held) = self.lock().held.get_mut(&i) {
                held.bytes = Some(Arc::new(buffer));
            }
            self.changed.notify_all();
        }
    }

    /// The next chunk and memory for it, once there is capacity; `None` if nothing is left to read. Chunks are claimed
    /// in the order in which they are taken, so the chunk that a rank waits for always has memory.
    fn claim(&self) -> Option<(usize, Vec<u8>)> {
        let mut state = self.lock();
        loop {
            let i = state.next;
            if state.stopped || i == self.chunks.len() {
                return None;
            }
            if state.held.len() < self.limit {
                state.next += 1;
                state.held.insert(i, Held::default());
                return Some((i, state.spare.pop().unwrap_or_default()));
            }
            state = self.wait(state);
        }
    }

    /// Waits for chunk `i` and lends its bytes to `copy`, which copies `copied` bytes of them. A chunk may be taken in
    /// several parts, by any thread. The threads of a rank must begin with earlier chunks before later ones.
    pub fn take(&self, i: usize, copied: usize, copy: impl FnOnce(&[u8])) -> Result<(), WeightsError> {
        let mut state = self.lock();
        let bytes = loop {
            if state.stopped {
                return Err(WeightsError::Device(aborted()));
            }
            match state.held.get(&i).and_then(|held| held.bytes.clone()) {
                Some(bytes) => break bytes,
                None => state = self.wait(state),
            }
        };
        drop(state);
        copy(&bytes);
        // Before the bytes count as copied, because the last rank takes the buffer back.
        drop(bytes);
        let mut state = self.lock();
        let Some(held) = state.held.get_mut(&i) else { return Ok(()) };
        held.copied += copied;
        if held.copied == self.chunks[i].copied {
            let bytes = state.held.remove(&i).and_then(|held| held.bytes);
            state.spare.extend(bytes.and_then(|bytes| Arc::try_unwrap(bytes).ok()));
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Ends the load of all ranks; the first error counts.
    pub fn fail(&self, error: WeightsError) {
        self.lock().failure.get_or_insert(error);
        self.stop();
    }

    fn stop(&self) {
        self.lock().stopped = true;
        self.changed.notify_all();
    }

    /// The first error.
    pub fn take_failure(&self) -> Option<WeightsError> {
        self.lock().failure.take()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A thread that panics stops the feed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'b>(&self, state: MutexGuard<'b, State>) -> MutexGuard<'b, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

fn read_chunk(chunk: &Chunk<'_>, buffer: &mut Vec<u8>) -> Result<(), WeightsError> {
    if buffer.capacity() < chunk.bytes {
        // Reallocated rather than grown: the contents are not needed, and growth could double the capacity.
        *buffer = Vec::with_capacity(chunk.bytes);
    }
    buffer.resize(chunk.bytes, 0);
    chunk.stored.read(chunk.first, buffer).map_err(|error| named(&chunk.name, error))
}

/// Stops the feed if its thread panics, because the others would wait for it.
#[derive(Debug)]
pub(super) struct StopOnPanic<'a>(pub &'a Feed<'a>);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop();
        }
    }
}
