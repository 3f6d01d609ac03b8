//! Reusable scratch memory of CPU kernels, so that a step of the engine does not allocate.

use bytemuck::{Pod, Zeroable};
use std::fmt;

/// One cache line: the unit of allocation, which gives the alignment.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Growable, 64-byte aligned scratch memory. It grows to the largest request and never shrinks.
#[derive(Default)]
pub struct Scratch {
    lines: Vec<Line>,
}

impl Scratch {
    /// Empty scratch memory; the first use allocates.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns `len` elements of scratch, 64-byte aligned, with undefined contents.
    pub fn slice<T: Pod>(&mut self, len: usize) -> &mut [T] {
        let lines = (len * size_of::<T>()).div_ceil(size_of::<Line>());
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0; 64]));
        }
        &mut bytemuck::cast_slice_mut(&mut self.lines[..lines])[..len]
    }
}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scratch({} bytes)", self.lines.len() * size_of::<Line>())
    }
}
