//! Pinned memory through which everything from the host to the device passes.

use super::memory::PinnedBuffer;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use std::sync::Arc;

/// Bytes of the largest single copy of a step's inputs, of which two may be on their way: as much as a row of them takes in
/// the largest step that an engine may have, see `engine::options`.
pub(super) const STAGING_BYTES: usize = 1 << 20;

/// Pieces begin at a cache line.
const ALIGN: usize = 64;

/// Two halves: one is filled while copies from the other are in flight. A half is handed out again only when the copies
/// that were made from it are done.
pub(super) struct Staging {
    pinned: PinnedBuffer,
    /// For each half: after its last copy.
    done: [CudaEvent; 2],
    halves: Halves,
}

impl Staging {
    /// Each half has `bytes` bytes.
    pub fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DriverError> {
        let done = [context.new_event(None)?, context.new_event(None)?];
        Ok(Self { pinned: PinnedBuffer::new(context, 2 * bytes)?, done, halves: Halves::new(bytes) })
    }

    /// `bytes` bytes, at most a half, to be filled and copied on `stream` before the next call.
    pub fn take(&mut self, stream: &CudaStream, bytes: usize) -> Result<&mut [u8], DriverError> {
        let done = &self.done;
        let first = self.halves.take(bytes, |left, entered| {
            done[left].record(stream)?;
            done[entered].synchronize()
        })?;
        Ok(&mut self.pinned.slice_mut()[first..][..bytes])
    }
}

/// Which bytes of two halves are handed out.
struct Halves {
    bytes: usize,
    half: usize,
    used: usize,
}

impl Halves {
    fn new(bytes: usize) -> Self {
        Self { bytes, half: 0, used: 0 }
    }

    /// Where the next `bytes` bytes begin. Where they begin the other half, `turn(left, entered)` marks the end of the
    /// copies from the half that is left, and waits for those from the half that is entered.
    fn take<E>(&mut self, bytes: usize, turn: impl FnOnce(usize, usize) -> Result<(), E>) -> Result<usize, E> {
        assert!(bytes <= self.bytes, "{bytes} bytes do not fit a piece of the staging memory");
        if self.used + bytes > self.bytes {
            turn(self.half, self.half ^ 1)?;
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

    /// A copy engine that ends a copy as late as it may: when somebody waits for a mark behind it.
    #[derive(Default)]
    struct Lazy {
        started: Vec<Range<usize>>,
        ended: usize,
        /// For each half: copies before its mark.
        marks: [usize; 2],
    }

    #[test]
    fn no_bytes_are_handed_out_while_a_copy_may_read_them() {
        const HALF: usize = 1 << 10;
        let (mut halves, mut engine) = (Halves::new(HALF), Lazy::default());
        let mut turns = 0;
        for i in 0..10_000 {
            // Whole halves and small pieces in turn.
            let bytes = if rng::bits(7, i).is_multiple_of(4) { HALF } else { 1 + rng::bits(8, i) as usize % 300 };
            let turn = |left: usize, entered: usize| {
                turns += 1;
                engine.marks[left] = engine.started.len();
                engine.ended = engine.ended.max(engine.marks[entered]);
                Ok::<_, Infallible>(())
            };
            let Ok(first) = halves.take(bytes, turn);
            assert!(first % ALIGN == 0 && first / HALF == (first + bytes - 1) / HALF, "{bytes} bytes at {first}");
            let taken = first..first + bytes;
            let in_flight = &engine.started[engine.ended..];
            let free = in_flight.iter().all(|copy| copy.end <= taken.start || taken.end <= copy.start);
            assert!(free, "{taken:?} is handed out while {in_flight:?} are in flight");
            engine.started.push(taken);
        }
        assert!(turns > 2500 && engine.started.len() - engine.ended < 100, "{turns} turns");
    }
}
