//! Memory that slots are read into and written from.

use super::format::PAGE;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// Memory of one slot, owned by the store while a job is under way.
///
/// Direct I/O needs memory that starts at a multiple of 4,096 bytes. Other memory goes through the page cache.
///
/// # Safety
///
/// `start` and `len` name initialised bytes that stay at this address until the value is dropped, however often the
/// value itself is moved. While the store owns the value, nobody else writes these bytes, and during
/// [`read`](super::DiskStore::read) nobody else reads them either.
pub unsafe trait SlotMemory: Send + 'static {
    /// First byte.
    fn start(&self) -> *mut u8;

    /// Number of bytes.
    fn len(&self) -> usize;

    /// True if there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Allocated memory that direct I/O can use.
#[derive(Debug)]
pub struct AlignedMemory {
    start: NonNull<u8>,
    layout: Layout,
}

impl AlignedMemory {
    /// `len` zeros; at least 1 byte.
    pub fn zeroed(len: usize) -> Self {
        assert!(len > 0, "an allocation has bytes");
        let layout = Layout::from_size_align(len, PAGE).expect("a length that fits into the address space");
        // SAFETY: the layout has bytes.
        let start = unsafe { alloc_zeroed(layout) };
        Self { start: NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout)), layout }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the allocation has this many initialised bytes, and `&mut self` is needed to change them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.layout.size()) }
    }

    /// The bytes, to be changed.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the allocation has this many initialised bytes, and nobody else can have them.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }
}

impl Drop for AlignedMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

// SAFETY: the value owns its allocation, like a `Vec`.
unsafe impl Send for AlignedMemory {}
// SAFETY: `&self` only reads.
unsafe impl Sync for AlignedMemory {}

// SAFETY: the allocation stays where it is until it is dropped, and only the owner of the value can access it.
unsafe impl SlotMemory for AlignedMemory {
    fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    fn len(&self) -> usize {
        self.layout.size()
    }
}
