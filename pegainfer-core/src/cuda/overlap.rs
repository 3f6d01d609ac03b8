//! Check of programmatic dependent launch: which operands a kernel may read before its predecessors have ended.
//!
//! An overlapped kernel may start while the kernels before it still run. Before it waits for them, it reads only
//! operands that none of them writes; each launch declares these with [`Launch::early`](super::Launch::early). This
//! module tracks the writes of kernels that may still run and compares. The check is on in debug builds, and in release
//! builds if the environment variable `PEGAINFER_CHECK_OVERLAP` is 1. A step that replays a CUDA graph is checked at
//! capture.

use crate::tensor::Tensor;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Memory of a tensor, and its name for messages.
#[derive(Debug, Clone)]
pub(super) struct Span {
    name: String,
    /// First byte.
    start: u64,
    /// Address after the last byte.
    end: u64,
}

impl Span {
    pub fn of(tensor: &Tensor) -> Self {
        let start = tensor.device();
        Self { name: tensor.name().to_owned(), start, end: start + tensor.bytes() }
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// When a kernel starts, and when it releases the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// After all kernels before it have ended.
    Serialised,
    /// Starts as soon as the kernels before it allow.
    Overlapped,
    /// Like `Overlapped`, but releases the next kernel only after the kernels before it have ended.
    OverlappedLateRelease,
}

/// Writes of the kernels that may still run when the next overlapped kernel starts, with the kernel of each.
#[derive(Debug, Default)]
pub(super) struct PendingWrites(Vec<(&'static str, Span)>);

impl PendingWrites {
    /// Declares a kernel that reads `early` before it waits and writes `writes`. Panics if a write to one of the former
    /// is pending.
    pub fn launch(&mut self, kernel: &'static str, start: Start, early: &[Span], writes: Vec<Span>) {
        if start == Start::Serialised {
            self.0.clear();
        }
        for read in early {
            let conflict = self.0.iter().find(|(_, write)| write.overlaps(read));
            if let Some((writer, write)) = conflict {
                panic!(
                    "kernel {kernel} may read {} before its predecessors have ended, but {writer} writes {}: launch \
                     {kernel} serialised, or let it read this operand after its wait",
                    read.name, write.name
                );
            }
        }
        if start == Start::OverlappedLateRelease {
            self.0.clear();
        }
        self.0.extend(writes.into_iter().map(|write| (kernel, write)));
    }

    /// Declares work that starts after all kernels have ended and that later kernels wait for: a copy, a graph, or a
    /// library's kernel.
    pub fn complete(&mut self) {
        self.0.clear();
    }
}

/// Pending writes of a GPU's stream, if the check is on.
#[derive(Debug, Clone, Default)]
pub(super) struct OverlapCheck(Option<Arc<Mutex<PendingWrites>>>);

impl OverlapCheck {
    /// On in debug builds and if `PEGAINFER_CHECK_OVERLAP` is 1.
    pub fn new() -> Self {
        let asked = std::env::var("PEGAINFER_CHECK_OVERLAP").is_ok_and(|value| value == "1");
        Self((cfg!(debug_assertions) || asked).then(Arc::default))
    }

    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// The pending writes, if they are checked.
    pub fn pending(&self) -> Option<MutexGuard<'_, PendingWrites>> {
        // A panic of the check leaves plain data.
        Some(self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(name: &str, start: u64, bytes: u64) -> Span {
        Span { name: name.to_owned(), start, end: start + bytes }
    }

    #[test]
    fn what_earlier_kernels_write_may_not_be_read_early() {
        let mut pending = PendingWrites::default();
        pending.launch("norm", Start::Serialised, &[], vec![span("normed", 0, 64)]);
        pending.launch("gemm", Start::Overlapped, &[span("weight", 1000, 64)], vec![span("qkv", 64, 64)]);
        pending.launch("rope", Start::Overlapped, &[span("after", 128, 64)], vec![]);
        for read in [span("normed", 0, 64), span("part", 100, 4)] {
            let early = std::panic::catch_unwind(|| {
                let mut pending = PendingWrites(pending.0.clone());
                pending.launch("attention", Start::Overlapped, &[read], vec![]);
            });
            let message = *early.unwrap_err().downcast::<String>().unwrap();
            assert!(message.contains("kernel attention may read"), "{message}");
        }
    }

    #[test]
    fn kernels_that_have_ended_are_no_conflict() {
        let write = || vec![span("out", 0, 64)];
        let early = [span("out", 0, 64)];
        let mut pending = PendingWrites::default();
        pending.launch("a", Start::Overlapped, &[], write());
        pending.launch("b", Start::Serialised, &early, write());
        pending.complete();
        pending.launch("c", Start::Overlapped, &early, write());
        pending.launch("prefill", Start::OverlappedLateRelease, &[], vec![span("other", 64, 64)]);
        pending.launch("decode", Start::Overlapped, &early, vec![]);
    }
}
