//! Pinned staging memory for copies from the host to the device.

use super::memory::PinnedBuffer;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use std::sync::Arc;

/// Maximum size in bytes of one copy of a step's inputs: one row of inputs in the largest step that an engine may have
/// (`engine::options`). Two copies may be in flight.
pub(super) const STAGING_BYTES: usize = 1 << 20;

/// Alignment of staged bytes: a cache line.
const ALIGN: usize = 64;

/// A double buffer: one half is filled while copies from the other half are in flight. A half is reused only when the
/// copies from it are complete.
pub(super) struct Staging {
    pinned: PinnedBuffer,
    /// Event after the last copy of each half.
    done: [CudaEvent; 2],
    halves: Halves,
}

impl Staging {
    /// A double buffer with halves of `bytes` bytes.
    pub fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DriverError> {
        let done = [context.new_event(None)?, context.new_event(None)?];
        Ok(Self { pinned: PinnedBuffer::new(context, 2 * bytes)?, done, halves: Halves::new(bytes) })
    }

    /// Returns `bytes` bytes, at most one half, to fill and copy on `stream` before the next call.
    pub fn take(&mut self, stream: &CudaStream, bytes: usize) -> Result<&mut [u8], DriverError> {
        let done = &self.done;
        let first = self.halves.take(bytes, |left, entered| {
            done[left].record(stream)?;
            done[entered].synchronize()
        })?;
        Ok(&mut self.pinned.slice_mut()[first..][..bytes])
    }
}

/// Allocation state of the two halves.
struct Halves {
    bytes: usize,
    half: usize,
    used: usize,
}

impl Halves {
    fn new(bytes: usize) -> Self {
        Self { bytes, half: 0, used: 0 }
    }

    /// Offset of the next `bytes` bytes. If they start the other half, `switch(left, entered)` records the end of the
    /// copies from the half that is left, and waits for those from the half that is entered.
    fn take<E>(&mut self, bytes: usize, switch: impl FnOnce(usize, usize) -> Result<(), E>) -> Result<usize, E> {
        assert!(bytes <= self.bytes, "{bytes} bytes do not fit a half of the staging buffer");
        if self.used + bytes > self.bytes {
            switch(self.half, self.half ^ 1)?;
            self.half ^= 1;
            self.used = 0;
        }
        let first = self.half * self.bytes + self.used;
        self.used += bytes.next_multiple_of(ALIGN);
        Ok(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng;
    use std::convert::Infallible;
    use std::ops::Range;

    /// A mock copy engine that completes a copy as late as possible: when a later event is waited for.
    #[derive(Default)]
    struct Lazy {
        started: Vec<Range<usize>>,
        ended: usize,
        /// Number of copies before the event of each half.
        marks: [usize; 2],
    }

    #[test]
    fn staged_bytes_are_not_reused_while_a_copy_may_read_them() {
        const HALF: usize = 1 << 10;
        let (mut halves, mut engine) = (Halves::new(HALF), Lazy::default());
        let mut switches = 0;
        for i in 0..10_000 {
            // Whole halves and small requests.
            let bytes = if rng::bits(7, i).is_multiple_of(4) { HALF } else { 1 + rng::bits(8, i) as usize % 300 };
            let switch = |left: usize, entered: usize| {
                switches += 1;
                engine.marks[left] = engine.started.len();
                engine.ended = engine.ended.max(engine.marks[entered]);
                Ok::<_, Infallible>(())
            };
            let Ok(first) = halves.take(bytes, switch);
            assert!(first % ALIGN == 0 && first / HALF == (first + bytes - 1) / HALF, "{bytes} bytes at {first}");
            let taken = first..first + bytes;
            let in_flight = &engine.started[engine.ended..];
            let free = in_flight.iter().all(|copy| copy.end <= taken.start || taken.end <= copy.start);
            assert!(free, "{taken:?} is reused while {in_flight:?} are in flight");
            engine.started.push(taken);
        }
        assert!(switches > 2500 && engine.started.len() - engine.ended < 100, "{switches} switches");
    }
}
