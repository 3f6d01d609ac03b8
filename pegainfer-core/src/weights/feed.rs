//! Reads a checkpoint once for all ranks. Reader threads run ahead of the ranks by a bounded number of chunks, each
//! rank takes its part of every chunk, and the memory of a chunk is reused after the last rank has taken its part.

#[cfg(test)]
mod tests;

use super::checkpoint::Checkpoint;
use super::error::WeightsError;
use super::stored::Stored;
use crate::parallel::aborted;
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// An E8M0 scale that is no number.
const E8M0_NAN: u8 = 255;

/// A tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name in the checkpoint.
    pub name: String,
    /// Stored dtype.
    pub dtype: Dtype,
    /// Stored shape.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Bytes of a row: of all dimensions but the first.
    pub fn row_bytes(&self) -> usize {
        self.shape[1..].iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// Limits of host memory in use.
#[derive(Debug, Clone, Copy)]
pub struct FeedLimits {
    /// Bytes of a chunk; of at least one row.
    pub chunk_bytes: usize,
    /// Chunks.
    pub chunks: usize,
}

impl FeedLimits {
    /// Half a gigabyte: several experts ahead of the slowest rank.
    pub const DEFAULT: Self = Self { chunk_bytes: 8 << 20, chunks: 64 };
}

/// Some rows of a tensor.
#[derive(Debug)]
struct Chunk {
    tensor: usize,
    rows: Range<usize>,
}

/// The chunks of a checkpoint, in the order in which every rank takes them.
#[derive(Debug)]
pub struct Feed<'a> {
    tensors: Vec<(TensorSpec, Stored<'a>)>,
    chunks: Vec<Chunk>,
    /// Maximum number of chunks in memory.
    limit: usize,
    /// Ranks that take each chunk.
    ranks: usize,
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
    /// Bytes that were read from the files.
    bytes_read: u64,
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
    /// Ranks that have taken their part.
    taken: usize,
}

impl<'a> Feed<'a> {
    /// A feed of these tensors, all of which `checkpoint` must have, for `ranks` ranks.
    pub fn new(
        checkpoint: &'a Checkpoint,
        tensors: Vec<TensorSpec>,
        ranks: usize,
        limits: FeedLimits,
    ) -> Result<Self, WeightsError> {
        let stored = |spec: TensorSpec| {
            let stored = checkpoint.stored(&spec.name, spec.dtype, &spec.shape)?;
            Ok((spec, stored))
        };
        let tensors = tensors.into_iter().map(stored).collect::<Result<Vec<_>, WeightsError>>()?;
        let mut chunks = Vec::new();
        for (tensor, (spec, _)) in tensors.iter().enumerate() {
            let (all, at_once) = (spec.shape[0], (limits.chunk_bytes / spec.row_bytes().max(1)).max(1));
            let chunk = |first: usize| Chunk { tensor, rows: first..(first + at_once).min(all) };
            chunks.extend((0..all).step_by(at_once).map(chunk));
        }
        let (state, changed) = (Mutex::default(), Condvar::new());
        Ok(Self { tensors, chunks, limit: limits.chunks, ranks, state, changed })
    }

    /// Reads chunks until there are none or the feed is stopped. Any number of threads may call it.
    pub fn read(&self) {
        let _guard = StopOnPanic(self);
        while let Some((i, mut buffer)) = self.claim() {
            let read = self.read_chunk(&self.chunks[i], &mut buffer);
            if let Err(error) = read {
                return self.fail(error);
            }
            let mut state = self.lock();
            state.bytes_read += buffer.len() as u64;
            if let Some(held) = state.held.get_mut(&i) {
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

    fn read_chunk(&self, chunk: &Chunk, buffer: &mut Vec<u8>) -> Result<(), WeightsError> {
        let (spec, stored) = &self.tensors[chunk.tensor];
        let row = spec.row_bytes();
        let bytes = chunk.rows.len() * row;
        if buffer.capacity() < bytes {
            // Reallocated rather than grown: the contents are not needed, and growth could double the capacity.
            *buffer = Vec::with_capacity(bytes);
        }
        buffer.resize(bytes, 0);
        stored.read(chunk.rows.start * row, buffer).map_err(|error| named(&spec.name, error))?;
        if spec.dtype == Dtype::F8_E8M0 && buffer.contains(&E8M0_NAN) {
            return Err(WeightsError::Mismatch {
                name: spec.name.clone(),
                found: "F8_E8M0 with a scale that is not a number".to_owned(),
                expected: "scales of 2^-127 to 2^127".to_owned(),
            });
        }
        Ok(())
    }

    /// Waits for chunk `i` and lends it to `part`, once for each rank.
    fn take(&self, i: usize, part: impl FnOnce(&[u8]) -> Result<(), WeightsError>) -> Result<(), WeightsError> {
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
        part(&bytes)?;
        // Before the chunk counts as taken, because the last rank takes the buffer back.
        drop(bytes);
        let mut state = self.lock();
        let Some(held) = state.held.get_mut(&i) else { return Ok(()) };
        held.taken += 1;
        if held.taken == self.ranks {
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

    /// Bytes that were read from the files so far.
    pub fn bytes_read(&self) -> u64 {
        self.lock().bytes_read
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A thread that panics stops the feed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'b>(&self, state: MutexGuard<'b, State>) -> MutexGuard<'b, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

/// Stops the feed if its thread panics, because the others would wait for it.
#[derive(Debug)]
pub struct StopOnPanic<'a>(pub &'a Feed<'a>);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop();
        }
    }
}

/// One rank's position in the feed.
#[derive(Debug)]
pub struct Cursor<'a> {
    feed: &'a Feed<'a>,
    tensor: usize,
    chunk: usize,
}

impl<'a> Cursor<'a> {
    /// Before the first tensor.
    pub fn new(feed: &'a Feed<'a>) -> Self {
        Self { feed, tensor: 0, chunk: 0 }
    }

    /// The feed of all ranks.
    pub fn feed(&self) -> &'a Feed<'a> {
        self.feed
    }

    /// Lends the chunks of the next tensor, `spec`, to `part`, which gets the rows and the bytes of each.
    pub fn next(
        &mut self,
        spec: &TensorSpec,
        mut part: impl FnMut(Range<usize>, &[u8]) -> Result<(), WeightsError>,
    ) -> Result<(), WeightsError> {
        assert_eq!(self.feed.tensors.get(self.tensor).map(|(spec, _)| spec), Some(spec), "tensors out of order");
        while let Some(chunk) = self.feed.chunks.get(self.chunk).filter(|chunk| chunk.tensor == self.tensor) {
            self.feed.take(self.chunk, |bytes| part(chunk.rows.clone(), bytes))?;
            self.chunk += 1;
        }
        self.tensor += 1;
        Ok(())
    }
}

/// Adds the tensor's name to `error` if it names only the file or the device.
pub fn named(name: &str, error: WeightsError) -> WeightsError {
    match error {
        WeightsError::Io { path, error } => {
            WeightsError::Io { path, error: std::io::Error::new(error.kind(), format!("{name}: {error}")) }
        }
        WeightsError::Device(mut error) => {
            error.message = format!("{name}: {}", error.message);
            WeightsError::Device(error)
        }
        error => error,
    }
}
