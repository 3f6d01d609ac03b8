//! Attention over a paged KV cache: the CPU twin.
//!
//! One layer's cache is two slices of bf16, block-major, in blocks of [`BLOCK`] tokens:
//! K block `[kv_heads][head_dim][16 tokens]` (a vector register holds one dimension of 16 tokens) and
//! V block `[kv_heads][16 tokens][head_dim]` (a vector register holds 16 dimensions of one token).

mod kernel;
mod state;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicUsize, Ordering};

use half::bf16;

use self::kernel::run_item;
use self::state::{Call, ITEM_LINES, Item, MAX_HEAD_DIM, Output, Scratch};
use super::isa::Isa;
use super::lanes::{Kernel, Lanes, dispatch};

/// Tokens per KV block.
pub const BLOCK: usize = 16;

/// Below this many multiply-adds, handing work to other threads costs more than it saves.
const SERIAL_WORK: usize = 1 << 18;

/// Head counts of one attention layer. Query head `j` uses KV head `j / group()`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements per head: a multiple of 16, at most 256.
    pub head_dim: usize,
}

impl AttentionShape {
    /// Query heads per KV head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Elements of one block of K, and of one block of V.
    pub fn block_len(&self) -> usize {
        self.kv_heads * self.head_dim * BLOCK
    }
}

/// Index of one element of K in the layer's cache; `offset` is the token's place in its block.
pub fn k_index(shape: &AttentionShape, block: usize, kv_head: usize, dim: usize, offset: usize) -> usize {
    ((block * shape.kv_heads + kv_head) * shape.head_dim + dim) * BLOCK + offset
}

/// Index of one element of V in the layer's cache; `offset` is the token's place in its block.
pub fn v_index(shape: &AttentionShape, block: usize, kv_head: usize, dim: usize, offset: usize) -> usize {
    ((block * shape.kv_heads + kv_head) * BLOCK + offset) * shape.head_dim + dim
}

/// Writes the key of one token and KV head. `head`: `[head_dim]`; `slot = block * 16 + offset`.
pub fn write_k(shape: &AttentionShape, k: &mut [bf16], slot: usize, kv_head: usize, head: &[bf16]) {
    assert_eq!(head.len(), shape.head_dim);
    let first = k_index(shape, slot / BLOCK, kv_head, 0, slot % BLOCK);
    for (to, from) in k[first..].iter_mut().step_by(BLOCK).zip(head) {
        *to = *from;
    }
}

/// Writes the value of one token and KV head. `head`: `[head_dim]`; `slot = block * 16 + offset`.
pub fn write_v(shape: &AttentionShape, v: &mut [bf16], slot: usize, kv_head: usize, head: &[bf16]) {
    assert_eq!(head.len(), shape.head_dim);
    let first = v_index(shape, slot / BLOCK, kv_head, 0, slot % BLOCK);
    v[first..first + shape.head_dim].copy_from_slice(head);
}

/// Causal softmax attention over a ragged batch and a paged KV cache: `out = softmax(scale * q kᵀ, causal) v`.
///
/// - `q`, `out`: `[tokens, heads * head_dim]` bf16.
/// - `k`, `v`: one layer's cache, `[num_blocks]` blocks in the layout of this module, bf16.
/// - `qo_indptr`: `[batch + 1]`; sequence `b` owns the rows `qo_indptr[b]..qo_indptr[b + 1]`, which may be none.
/// - `kv_lens`: `[batch]`, tokens in the cache after this step, the rows of this step included. Row `r` of sequence `b`
///   sits at position `kv_lens[b] - rows + r` and sees the positions up to and including its own.
/// - `block_tables`: `[batch, max_blocks]`, block ids in the order of position; entries past `kv_lens` are not read.
///
/// Numerics: q, k and v are widened to f32 (q times `scale` rounds once); scores, softmax and both sums are f32; one
/// rounding to bf16 at the end. Online softmax over tiles of 64 positions from position 0 (Milakov and Gimelshein,
/// arXiv 1805.02867; FlashAttention, arXiv 2205.14135), in base 2, `exp2` within 1.5e-7.
///
/// The bits of an output row depend on its q row, its position and the K and V of the positions it sees, on one `isa`:
/// not on the chunk, the batch, the block ids or the number of threads. Unused slots may hold anything.
///
/// # Panics
/// If a length does not fit the shape, or if the CPU lacks `isa`.
#[allow(clippy::too_many_arguments)] // the arguments of the op, each documented above
pub fn paged_attention(
    isa: Isa,
    shape: &AttentionShape,
    q: &[bf16],
    k: &[bf16],
    v: &[bf16],
    qo_indptr: &[u32],
    kv_lens: &[u32],
    block_tables: &[u32],
    max_blocks: usize,
    scale: f32,
    out: &mut [bf16],
) {
    let tokens = qo_indptr.last().map_or(0, |&t| t as usize);
    assert!(shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads), "{shape:?}");
    assert!(shape.head_dim.is_multiple_of(16) && (16..=MAX_HEAD_DIM).contains(&shape.head_dim), "{shape:?}");
    assert_eq!(qo_indptr.len(), kv_lens.len() + 1);
    assert_eq!(block_tables.len(), kv_lens.len() * max_blocks);
    assert!(q.len() == tokens * shape.heads * shape.head_dim && out.len() == q.len());
    assert!(k.len() == v.len() && k.len().is_multiple_of(shape.block_len()));

    let call = Call {
        shape: *shape,
        q,
        k: k.as_chunks().0,
        v: v.as_chunks().0,
        scale_log2: scale * std::f32::consts::LOG2_E,
        out: Output::new(out),
    };
    let items = plan(shape, qo_indptr, kv_lens, block_tables, max_blocks);
    run(isa, &call, &items);
}

/// Cuts the batch into work items, longest first so that the last ones to finish are short.
fn plan<'a>(
    shape: &AttentionShape,
    qo_indptr: &[u32],
    kv_lens: &[u32],
    block_tables: &'a [u32],
    max_blocks: usize,
) -> Vec<Item<'a>> {
    let rows_per_item = (ITEM_LINES / shape.group()).max(1);
    let mut items = Vec::new();
    for (b, &kv_len) in kv_lens.iter().enumerate() {
        let (begin, end, kv_len) = (qo_indptr[b] as usize, qo_indptr[b + 1] as usize, kv_len as usize);
        assert!(begin <= end && end - begin <= kv_len && kv_len <= max_blocks * BLOCK, "sequence {b}");
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

/// Runs the items on all threads of the current rayon pool, each thread taking the next one when it is done.
fn run(isa: Isa, call: &Call<'_>, items: &[Item<'_>]) {
    let next = &AtomicUsize::new(0);
    let worker = || dispatch(isa, Worker { call, items, next, scratch: Scratch::new(&call.shape) });
    let positions: usize = items.iter().map(|item| item.rows * (item.position + item.rows)).sum();
    let threads = rayon::current_num_threads().min(items.len());
    if threads <= 1 || positions * call.shape.group() * call.shape.head_dim < SERIAL_WORK {
        return worker();
    }
    rayon::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|_| worker());
        }
        worker();
    });
}

/// One thread's share of a call.
struct Worker<'a> {
    call: &'a Call<'a>,
    items: &'a [Item<'a>],
    /// The first item that no thread has taken.
    next: &'a AtomicUsize,
    scratch: Scratch,
}

impl Kernel for Worker<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(mut self, s: S) {
        while let Some(item) = self.items.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            run_item(s, self.call, item, &mut self.scratch);
        }
    }
}
