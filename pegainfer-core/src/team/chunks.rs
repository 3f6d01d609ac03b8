//! Loops over chunks: of indices, and of mutable slices.

use super::for_each;
use std::marker::PhantomData;
use std::ops::Range;

/// Runs `task(range)` for `0..count` split into ranges of `size` indices (at least 1), the last possibly shorter; see
/// [`for_each`](super::for_each).
pub fn for_each_range(count: usize, size: usize, task: impl Fn(Range<usize>) + Sync) {
    let size = size.max(1);
    for_each(count.div_ceil(size), |i| task(i * size..((i + 1) * size).min(count)));
}

/// Runs `task(i, chunk)` for the chunks of `size` elements (at least 1) of `data`, the last possibly shorter; see
/// [`for_each`](super::for_each).
pub fn for_each_chunk<T: Send>(data: &mut [T], size: usize, task: impl Fn(usize, &mut [T]) + Sync) {
    let chunks = Chunks::new(data, size);
    // SAFETY: the loop runs each index once.
    for_each(chunks.count(), |i| task(i, unsafe { chunks.get(i) }));
}

/// Runs `task(i, chunk of a, chunk of b)` for the chunks of two slices, each with its size, as [`for_each_chunk`].
///
/// # Panics
/// If the slices have different numbers of chunks.
pub fn for_each_chunk_pair<A: Send, B: Send>(
    (a, a_size): (&mut [A], usize),
    (b, b_size): (&mut [B], usize),
    task: impl Fn(usize, &mut [A], &mut [B]) + Sync,
) {
    let (a, b) = (Chunks::new(a, a_size), Chunks::new(b, b_size));
    assert_eq!(a.count(), b.count(), "chunks of two slices");
    // SAFETY: the loop runs each index once.
    for_each(a.count(), |i| unsafe { task(i, a.get(i), b.get(i)) });
}

/// A mutable slice that the tasks of a loop share by chunks.
struct Chunks<'a, T> {
    first: *mut T,
    len: usize,
    size: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: each chunk is used by one task, by the promise of the callers of `get`.
unsafe impl<T: Send> Sync for Chunks<'_, T> {}

impl<'a, T> Chunks<'a, T> {
    fn new(data: &'a mut [T], size: usize) -> Self {
        assert!(size > 0, "chunks of no elements");
        Self { first: data.as_mut_ptr(), len: data.len(), size, owner: PhantomData }
    }

    fn count(&self) -> usize {
        self.len.div_ceil(self.size)
    }

    /// Chunk `i`.
    ///
    /// # Safety
    /// No other code uses this chunk.
    #[allow(clippy::mut_from_ref)] // the caller promises that the chunk is unshared
    unsafe fn get(&self, i: usize) -> &mut [T] {
        assert!(i < self.count());
        let start = i * self.size;
        // SAFETY: in bounds (asserted), unshared (the caller's promise), and alive for the borrow in `owner`.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(start), self.size.min(self.len - start)) }
    }
}
