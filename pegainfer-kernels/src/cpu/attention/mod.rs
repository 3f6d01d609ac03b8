//! Reference kernel of attention over a paged KV cache.

mod kernel;
mod state;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::heads::BLOCK_SIZE;
use half::bf16;
use pegainfer_core::scratch::Scratch;
use pegainfer_core::team;

use self::kernel::run_item;
use self::state::{Call, ITEM_LINES, Item, LineState};
use super::disjoint::Disjoint;
use super::isa::Isa;
use super::kv_cache::{KvCache, KvElement};
use super::lanes::{Kernel, Lanes, dispatch};
use crate::heads::HeadShape;

/// Below this many multiply-adds, handing work to other threads costs more than it saves.
const SERIAL_WORK: usize = 1 << 18;

/// A ragged batch: which rows attend to which blocks. Entries past the end of a sequence are not read.
#[derive(Debug, Clone, Copy)]
pub struct PagedBatch<'a> {
    /// `[batch + 1]`; sequence `b` owns the rows `qo_indptr[b]..qo_indptr[b + 1]`, possibly none.
    pub qo_indptr: &'a [u32],
    /// `[batch]`, tokens in the cache after this step, including the rows of this step. Row `r` of sequence `b` is at
    /// position `kv_lens[b] - rows + r` and sees the positions up to and including its own.
    pub kv_lens: &'a [u32],
    /// `[batch, max_blocks]`, block ids in the order of position.
    pub block_tables: &'a [u32],
    /// Columns of `block_tables`.
    pub max_blocks: usize,
}

/// Causal softmax attention over a ragged batch and a paged KV cache: `out = softmax(scale * q kᵀ, causal) v`.
///
/// - `q`, `out`: `[tokens, heads * head_dim]` bf16.
/// - `cache`: one layer's keys and values, `[num_blocks]` blocks in the layout of [`HeadShape`].
/// - `scratch`: working memory of the call with arbitrary contents.
///
/// Numerics: q, k and v are widened to f32 (q times `scale` rounds once); scores, softmax and both sums are f32, with
/// one final rounding to bf16. Scales of an FP8 cache multiply the scores, and the weights before these multiply the
/// values. Online softmax over tiles of 64 positions from position 0 (Milakov and Gimelshein, arXiv 1805.02867;
/// FlashAttention, arXiv 2205.14135), in base 2, `exp2` within 1.5e-7.
///
/// On one `isa`, the bits of an output row depend on its q row, its position and the K and V of the positions it sees,
/// but not on the chunk, the batch, the block ids or the number of threads. Unused slots may hold anything. A sequence
/// of length 0 pads the batch to the shape of a CUDA graph; the output of its queries stays unchanged.
///
/// # Panics
/// If a length does not fit the shape, or if the CPU lacks `isa`.
#[expect(clippy::too_many_arguments, reason = "the arguments of the op, each documented above")]
pub fn paged_attention(
    isa: Isa,
    shape: HeadShape,
    q: &[bf16],
    cache: KvCache<'_>,
    batch: &PagedBatch<'_>,
    scale: f32,
    scratch: &mut Scratch,
    out: &mut [bf16],
) {
    let tokens = batch.qo_indptr.last().map_or(0, |&t| t as usize);
    assert!(shape.is_supported(), "{shape:?}");
    assert_eq!(batch.qo_indptr.len(), batch.kv_lens.len() + 1);
    assert_eq!(batch.block_tables.len(), batch.kv_lens.len() * batch.max_blocks);
    assert!(q.len() == tokens * shape.q_width() && out.len() == q.len());
    let scale_log2 = scale * std::f32::consts::LOG2_E;
    let items = plan(shape, batch);
    match cache {
        KvCache::Bf16(k, v) => run(isa, &Call::new(shape, q, (k, v), scale_log2, out), &items, scratch),
        KvCache::Fp8(k, v) => run(isa, &Call::new(shape, q, (k, v), scale_log2, out), &items, scratch),
    }
}

impl<'a, E: KvElement> Call<'a, E> {
    fn new(shape: HeadShape, q: &'a [bf16], (k, v): (&'a [E], &'a [E]), scale_log2: f32, out: &'a mut [bf16]) -> Self {
        assert!(k.len() == v.len() && k.len().is_multiple_of(shape.block_len(E::FORMAT)));
        Self { shape, q, k: k.as_chunks().0, v: v.as_chunks().0, scale_log2, out: Disjoint::new(out) }
    }
}

/// Splits the batch into work items, longest first so that the last ones to finish are short.
fn plan<'a>(shape: HeadShape, batch: &PagedBatch<'a>) -> Vec<Item<'a>> {
    let PagedBatch { qo_indptr, kv_lens, block_tables, max_blocks } = *batch;
    let rows_per_item = (ITEM_LINES / shape.group()).max(1);
    let mut items = Vec::new();
    for (b, &kv_len) in kv_lens.iter().enumerate() {
        let (begin, end, kv_len) = (qo_indptr[b] as usize, qo_indptr[b + 1] as usize, kv_len as usize);
        if kv_len == 0 {
            continue;
        }
        assert!(begin <= end && end - begin <= kv_len && kv_len <= max_blocks * BLOCK_SIZE, "sequence {b}");
        let table = &block_tables[b * max_blocks..][..max_blocks];
        for row in (begin..end).step_by(rows_per_item) {
            let rows = rows_per_item.min(end - row);
            let position = kv_len - (end - row);
            items.extend((0..shape.kv_heads).map(|kv_head| Item { table, kv_head, row, rows, position }));
        }
    }
    items.sort_by_key(|item| std::cmp::Reverse(item.rows * (item.position + item.rows)));
    items
}

/// Runs the items on all threads of the current team; each thread takes the next item when it is done.
fn run<E: KvElement>(isa: Isa, call: &Call<'_, E>, items: &[Item<'_>], scratch: &mut Scratch) {
    let positions: usize = items.iter().map(|item| item.rows * (item.position + item.rows)).sum();
    let threads = match positions * call.shape.group() * call.shape.head_dim {
        ..SERIAL_WORK => 1,
        _ => team::threads().min(items.len()),
    };
    let next = &AtomicUsize::new(0);
    let len = LineState::memory(call.shape);
    team::for_each_chunk(scratch.slice(threads * len), len, |_, memory| {
        dispatch(isa, Worker { call, items, next, lines: LineState::new(call.shape, memory) });
    });
}

/// The work of one thread of a call.
struct Worker<'a, E> {
    call: &'a Call<'a, E>,
    items: &'a [Item<'a>],
    /// Index of the next item to take.
    next: &'a AtomicUsize,
    lines: LineState<'a>,
}

impl<E: KvElement> Kernel for Worker<'_, E> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(mut self, s: S) {
        let take = || self.items.get(self.next.fetch_add(1, Ordering::Relaxed));
        let mut next = take();
        while let Some(item) = next {
            next = take();
            run_item(s, self.call, item, next, &mut self.lines);
        }
    }
}
