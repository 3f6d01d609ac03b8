//! An array that several threads write concurrently, each its own elements.

use std::marker::PhantomData;

use half::bf16;

/// A mutable slice that tasks share because their parts are no ranges that safe code could split.
pub(super) struct Disjoint<'a, T = bf16> {
    first: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: elements are reached only through methods whose callers guarantee that the parts in use are disjoint.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T: Copy> Disjoint<'a, T> {
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        Self { first: slice.as_mut_ptr(), len: slice.len(), owner: PhantomData }
    }

    /// The elements `at..at + len`.
    ///
    /// # Safety
    /// No other part in use overlaps this one.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // the caller promises disjoint parts
    pub(super) unsafe fn slice(&self, at: usize, len: usize) -> &mut [T] {
        assert!(at <= self.len && len <= self.len - at);
        // SAFETY: in bounds (asserted), unaliased (the caller's promise), and alive for the borrow in `owner`.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(at), len) }
    }

    /// Writes `values` to the elements `at`, `at + stride` and so on.
    ///
    /// # Safety
    /// No part in use holds one of these elements.
    #[inline(always)]
    pub(super) unsafe fn scatter(&self, at: usize, stride: usize, values: &[T]) {
        let last = at + values.len().saturating_sub(1) * stride;
        assert!(last < self.len);
        for (i, value) in values.iter().enumerate() {
            // SAFETY: not past `last`, so in bounds (asserted), and unaliased (the caller's promise).
            unsafe { *self.first.add(at + i * stride) = *value };
        }
    }
}
