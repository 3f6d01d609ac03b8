//! What a work item of paged attention reads, keeps and writes.

use std::marker::PhantomData;

use half::bf16;

use super::{AttentionShape, BLOCK};
use crate::cpu::lanes::Lanes;

/// Query lines per work item: enough to use a KV tile several times while it is in the L1 cache, few enough that a
/// short prompt still feeds all cores.
pub(crate) const ITEM_LINES: usize = 48;

/// Largest supported head dimension. A constant row stride lets the compiler address the broadcasts of a register tile
/// from one pointer.
pub(crate) const MAX_HEAD_DIM: usize = 256;

/// Lines that a register tile may touch past the last one of an item.
const PADDING: usize = 16;

/// Arguments shared by all work items of one call.
pub(crate) struct Call<'a> {
    pub shape: AttentionShape,
    /// `[tokens, heads, head_dim]`.
    pub q: &'a [bf16],
    /// `[blocks, kv_heads, head_dim]` rows of 16 tokens.
    pub k: &'a [[bf16; BLOCK]],
    /// `[blocks, kv_heads, 16 tokens, head_dim / 16]` rows of 16 dimensions.
    pub v: &'a [[bf16; BLOCK]],
    /// Softmax scale times log2(e), folded into q: softmax is computed in base 2.
    pub scale_log2: f32,
    pub out: Output<'a>,
}

/// One unit of work; the items of a call are disjoint in (token, KV head).
pub(crate) struct Item<'a> {
    /// Blocks of this sequence, in order.
    pub table: &'a [u32],
    pub kv_head: usize,
    /// First row of `q` and `out`.
    pub row: usize,
    pub rows: usize,
    /// Absolute position of the first row.
    pub position: usize,
}

/// State of the lines of the item in work; one per thread.
pub(crate) struct Scratch {
    /// `[lines][head_dim]`, scaled.
    pub q: Vec<[f32; MAX_HEAD_DIM]>,
    /// `[lines][head_dim / 16][16]`: sum of `p * v`.
    pub acc: Vec<[f32; 16]>,
    /// Largest score so far.
    pub max: Vec<f32>,
    /// Sum of `p`, kept in 16 lanes until the end.
    pub sum: Vec<[f32; 16]>,
}

impl Scratch {
    pub(crate) fn new(shape: &AttentionShape) -> Self {
        let lines = ITEM_LINES.max(shape.group()) + PADDING;
        Self {
            q: vec![[0.0; MAX_HEAD_DIM]; lines],
            acc: vec![[0.0; 16]; lines * shape.head_dim / 16],
            max: vec![0.0; lines],
            sum: vec![[0.0; 16]; lines],
        }
    }

    /// Loads and scales the query lines of `item` and clears their state.
    #[inline(always)]
    pub(crate) fn load(&mut self, call: &Call<'_>, item: &Item<'_>) {
        let AttentionShape { heads, head_dim, .. } = call.shape;
        let group = call.shape.group();
        for row in 0..item.rows {
            let first = ((item.row + row) * heads + item.kv_head * group) * head_dim;
            let heads = call.q[first..first + group * head_dim].chunks_exact(head_dim);
            for (line, head) in self.q[row * group..].iter_mut().zip(heads) {
                for (to, from) in line.iter_mut().zip(head) {
                    *to = f32::from_bits(u32::from(from.to_bits()) << 16) * call.scale_log2;
                }
            }
        }
        let lines = item.rows * group;
        self.acc[..lines * head_dim / 16].fill([0.0; 16]);
        self.max[..lines].fill(f32::NEG_INFINITY);
        self.sum[..lines].fill([0.0; 16]);
    }
}

/// Divides by the sum of `p`, rounds once to bf16 and writes the rows of `out`.
#[inline(always)]
pub(crate) fn finish<S: Lanes>(s: S, call: &Call<'_>, item: &Item<'_>, scratch: &Scratch) {
    let AttentionShape { heads, head_dim, .. } = call.shape;
    let group = call.shape.group();
    let columns = head_dim / 16;
    for line in 0..item.rows * group {
        let sum = s.splat(s.sum(s.load(&scratch.sum[line])));
        let head = (item.row + line / group) * heads + item.kv_head * group + line % group;
        // SAFETY: (token, query head) belongs to this item alone, see `Item`.
        let out = unsafe { call.out.row(head * head_dim, head_dim) };
        for (to, from) in out.as_chunks_mut().0.iter_mut().zip(&scratch.acc[line * columns..][..columns]) {
            s.narrow(s.div(s.load(from), sum), to);
        }
    }
}

/// The output, written by all threads in disjoint pieces.
pub(crate) struct Output<'a> {
    first: *mut bf16,
    len: usize,
    owner: PhantomData<&'a mut [bf16]>,
}

// SAFETY: an `Output` only hands out pieces that its users promise to be disjoint (see `row`).
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    pub(crate) fn new(out: &'a mut [bf16]) -> Self {
        Self { first: out.as_mut_ptr(), len: out.len(), owner: PhantomData }
    }

    /// The elements `at..at + len`.
    ///
    /// # Safety
    /// No other piece in use overlaps this one.
    #[allow(clippy::mut_from_ref)] // the caller promises disjoint pieces
    unsafe fn row(&self, at: usize, len: usize) -> &mut [bf16] {
        assert!(at + len <= self.len);
        // SAFETY: in bounds (asserted), unaliased (the caller's promise), and alive for the borrow in `owner`.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(at), len) }
    }
}
