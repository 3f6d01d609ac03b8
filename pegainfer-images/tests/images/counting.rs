//! An allocator that counts the memory of each thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes that the thread has allocated and not freed, and their maximum.
    static BYTES: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(change: isize) {
    // A thread that ends also frees.
    let _ = BYTES.try_with(|bytes| {
        let (now, peak) = bytes.get();
        bytes.set((now + change, peak.max(now + change)));
    });
}

// SAFETY: all memory comes from the system's allocator, with the same layouts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are those of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are those of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the memory is the system's, of this layout.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// The result of `work`, and the largest number of bytes that it had allocated at once.
pub fn peak_bytes<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = BYTES.with(|bytes| {
        let (now, _) = bytes.get();
        bytes.set((now, now));
        now
    });
    let result = work();
    (result, BYTES.with(|bytes| (bytes.get().1 - before) as usize))
}
