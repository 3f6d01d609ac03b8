//! Operands, state and output of one work item of paged attention.

use crate::heads::BLOCK_SIZE;
use half::bf16;

use crate::cpu::disjoint::Disjoint;
use crate::cpu::lanes::Lanes;
use crate::heads::{HeadShape, MAX_HEAD_DIM};

/// Query lines per work item: enough to use a KV tile several times while it is in the L1 cache, few enough that a
/// short prompt still feeds all cores.
pub(crate) const ITEM_LINES: usize = 48;

/// Lines that a register tile may touch past the last one of an item.
const PADDING: usize = 16;

/// Arguments shared by all work items of one call.
pub(crate) struct Call<'a, E> {
    pub shape: HeadShape,
    /// `[tokens, heads, head_dim]`.
    pub q: &'a [bf16],
    /// `[blocks, kv_heads, head_dim]` rows of 16 tokens, followed by the scales of each block and head.
    pub k: &'a [[E; BLOCK_SIZE]],
    /// `[blocks, kv_heads, 16 tokens, head_dim / 16]` rows of 16 dimensions, and scales as in `k`.
    pub v: &'a [[E; BLOCK_SIZE]],
    /// Softmax scale times log2(e), folded into q: softmax is computed in base 2.
    pub scale_log2: f32,
    pub out: Disjoint<'a>,
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
pub(crate) struct LineState<'a> {
    /// `[lines][head_dim]`, scaled. A constant row stride lets the compiler address the broadcasts of a register tile
    /// from one pointer.
    pub q: &'a mut [[f32; MAX_HEAD_DIM]],
    /// `[lines][head_dim / 16][16]`: sum of `p * v`.
    pub acc: &'a mut [[f32; 16]],
    /// Sum of `p`, kept in 16 lanes until the end.
    pub sum: &'a mut [[f32; 16]],
    /// Largest score so far.
    pub max: &'a mut [f32],
}

impl<'a> LineState<'a> {
    fn lines(shape: HeadShape) -> usize {
        (ITEM_LINES.max(shape.group()) + PADDING).next_multiple_of(16)
    }

    /// Number of f32 values that [`new`](Self::new) takes, a multiple of 16.
    pub(crate) fn memory(shape: HeadShape) -> usize {
        Self::lines(shape) * (MAX_HEAD_DIM + shape.head_dim + 16 + 1)
    }

    /// Splits `memory`, whose contents are arbitrary; [`load`](Self::load) sets the state of an item.
    pub(crate) fn new(shape: HeadShape, memory: &'a mut [f32]) -> Self {
        let lines = Self::lines(shape);
        let (q, memory) = memory.split_at_mut(lines * MAX_HEAD_DIM);
        let (acc, memory) = memory.split_at_mut(lines * shape.head_dim);
        let (sum, max) = memory.split_at_mut(lines * 16);
        Self { q: q.as_chunks_mut().0, acc: acc.as_chunks_mut().0, sum: sum.as_chunks_mut().0, max }
    }

    /// Loads and scales the query lines of `item` and clears their state.
    #[inline(always)]
    pub(crate) fn load<E>(&mut self, call: &Call<'_, E>, item: &Item<'_>) {
        let HeadShape { heads, head_dim, .. } = call.shape;
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
pub(crate) fn finish<S: Lanes, E>(s: S, call: &Call<'_, E>, item: &Item<'_>, state: &LineState<'_>) {
    let HeadShape { heads, head_dim, .. } = call.shape;
    let group = call.shape.group();
    let columns = head_dim / 16;
    for line in 0..item.rows * group {
        let sum = s.splat(s.sum(s.load(&state.sum[line])));
        let head = (item.row + line / group) * heads + item.kv_head * group + line % group;
        // SAFETY: (token, query head) belongs to this item alone, see `Item`.
        let out = unsafe { call.out.slice(head * head_dim, head_dim) };
        for (to, from) in out.as_chunks_mut().0.iter_mut().zip(&state.acc[line * columns..][..columns]) {
            s.narrow(s.div(s.load(from), sum), to);
        }
    }
}
