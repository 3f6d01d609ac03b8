//! `sparse_attention` (csrc/deepseek_v4/attention.cu, csrc/deepseek_v4/attention_chunks.cu,
//! csrc/deepseek_v4/attention_wgmma.cu).

use super::norm::rope;
use super::rings::write_ring;
use super::run_early;
use super::skinny::pack_split;
use crate::choice::{self, DenseGemm};
use crate::cuda::abi::{AttentionChunks, AttentionWgmma, Entry, Map, MergeChunks, SparseAttention, Target};
use crate::limits::deepseek_v4_attention::{
    CHUNK, F32_THREADS, MAX_DIM, MERGE_THREADS, MMA_HEADS, ONE_GROUP_BYTES, TWO_GROUP_BYTES, WARP_DIM,
};
use crate::limits::deepseek_v4_attention_wgmma::{SHARED_BYTES_16, SHARED_BYTES_32, THREADS};
use crate::ops::deepseek_v4::{RaggedBatch, Split, Visible, WINDOW};
use pegainfer_core::cuda::WORKSPACE_BYTES;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

const OP: &str = "sparse_attention";

/// Blocks that fill every GPU: with fewer, the keys of a token are split over blocks, with the same bits.
const FILL: usize = 512;

/// Locations of the keys of tokens. Unused tensors have the address of another one.
struct Lists<'a> {
    kv: &'a Tensor,
    rings: &'a Tensor,
    /// Tokens of the window.
    window: usize,
    /// Minimum number of rows of a ring.
    ring: usize,
    entries: &'a Tensor,
    chosen: &'a Tensor,
    /// Pages of the entries; 0 without entries.
    entry_pages: usize,
    per_page: usize,
    /// Columns of `chosen`; 0 without.
    k: usize,
}

impl<'a> Lists<'a> {
    fn new((kv, rings): (&'a Tensor, &'a Tensor), visible: Visible<'a>, batch: &RaggedBatch<'a>) -> Self {
        let none = (kv, 0, 0);
        let (entries, entry_pages, per_page) =
            visible.entries().map_or(none, |entries| (entries, entries.shape()[0], entries.shape()[1]));
        let (chosen, k) = match visible {
            Visible::Chosen { chosen, .. } => (chosen, chosen.rows_cols().1),
            _ => (batch.positions, 0),
        };
        let ring = rings.shape()[1];
        Self { kv, rings, window: ring.min(WINDOW), ring, entries, chosen, entry_pages, per_page, k }
    }

    /// Chunks of the longest list, with `pages` pages.
    fn chunks(&self, pages: usize) -> usize {
        let entries = pages * self.per_page;
        (self.window + if self.k > 0 { self.k.min(entries) } else { entries }).div_ceil(CHUNK)
    }
}

/// `frequencies`: `[pairs]` f32, of the last `2 pairs` dimensions of a head.
pub(crate) fn sparse_attention(
    exec: &mut Exec,
    q: &Tensor,
    (kv, rings): (&Tensor, &mut Tensor),
    visible: Visible<'_>,
    (sink, frequencies): (&Tensor, &Tensor),
    batch: &RaggedBatch<'_>,
    (out, split): (&mut Tensor, Option<Split<'_>>),
) -> Result<(), OpError> {
    let (tokens, heads, dim) = (q.shape()[0], q.shape()[1], q.shape()[2]);
    if dim > MAX_DIM {
        return Err(OpError { op: OP, message: format!("heads of {dim} elements: the GPU kernel takes {MAX_DIM}") });
    }
    let lists = Lists::new((kv, &*rings), visible, batch);
    let chunks = lists.chunks(batch.page_tables.rows_cols().1);
    let partials = tokens * chunks * heads * (dim + 2) * DType::F32.size();
    let fills = tokens * heads.div_ceil(MMA_HEADS) >= FILL;
    match wgmma(exec, q)? {
        Some(entry) => by_wgmma(exec, entry, q, &lists, sink, batch, out)?,
        None if q.dtype() == DType::F32 || chunks == 1 || fills || partials > WORKSPACE_BYTES => {
            whole(exec, q, &lists, sink, batch, out)?;
        }
        None => {
            split_keys(exec, q, &lists, chunks, batch)?;
            let Lists { window, per_page, k, .. } = lists;
            let shape = Merge { window, per_page, k, chunks };
            return merge(exec, shape, (kv, rings), (sink, frequencies), batch, (out, split));
        }
    }
    rope(exec, OP, out, batch.positions, frequencies, true)?;
    write_ring(exec, OP, kv, batch, rings)?;
    match split {
        Some(Split { packed, columns }) => pack_split(exec, OP, out, columns, packed),
        None => Ok(()),
    }
}

/// The kernel for many tokens on Hopper that takes these queries, and its shared memory.
fn wgmma(exec: &mut Exec, q: &Tensor) -> Result<Option<(Entry<AttentionWgmma<'static>>, usize)>, OpError> {
    let hopper = choice::gpu(exec)?.is_some_and(|gpu| gpu.is_hopper());
    if !hopper || q.dtype() != DType::Bf16 || q.shape()[0] < DenseGemm::MIN_TOKENS {
        return Ok(None);
    }
    Ok(match q.shape()[1..] {
        [16, MAX_DIM] => Some((AttentionWgmma::sparse_attention_wgmma_16, SHARED_BYTES_16)),
        [32, MAX_DIM] => Some((AttentionWgmma::sparse_attention_wgmma_32, SHARED_BYTES_32)),
        _ => None,
    })
}

/// A block has a token, all of its heads and all of its keys (csrc/deepseek_v4/attention_wgmma.cu).
fn by_wgmma(
    exec: &mut Exec,
    (entry, shared): (Entry<AttentionWgmma<'static>>, usize),
    q: &Tensor,
    lists: &Lists<'_>,
    sink: &Tensor,
    batch: &RaggedBatch<'_>,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (tokens, heads, dim) = (q.shape()[0], q.shape()[1], q.shape()[2]);
    let Lists { kv, rings, window, ring, entries, chosen, entry_pages, per_page, k } = *lists;
    let RaggedBatch { qo_indptr, positions, slots, page_tables } = *batch;
    let (rows, pages) = page_tables.rows_cols();
    let arguments = AttentionWgmma {
        q: Map::heads(OP, q, heads)?,
        out: Map::output_heads(OP, out, heads)?,
        kv,
        rings,
        entries,
        chosen,
        sink,
        qo_indptr,
        positions,
        slots,
        page_tables,
        rows,
        pages,
        slot_count: rings.shape()[0],
        window,
        ring,
        entry_pages,
        per_page,
        k,
        scale: (dim as f32).sqrt().recip(),
    };
    let launch = entry.launch(exec.gpu()?, OP, arguments)?.overlapped();
    // SAFETY: the op checked the shapes, `wgmma` those of a query; the grid covers all tokens.
    unsafe { launch.shared(shared).run([tokens, 1, 1], THREADS) }
}

/// Threads of a block for heads of `dim` elements in bf16.
fn mma_threads(dim: usize) -> usize {
    32 * dim.div_ceil(WARP_DIM)
}

/// A kernel whose blocks process all keys of a token.
struct Whole {
    entry: Entry<SparseAttention<'static>>,
    /// Heads of a block.
    heads: usize,
    threads: usize,
    /// Bytes of dynamic shared memory.
    shared: usize,
}

impl Whole {
    fn new(exec: &mut Exec, dtype: DType, heads: usize, dim: usize) -> Result<Self, OpError> {
        if dtype == DType::F32 {
            let (entry, threads) = (SparseAttention::sparse_attention_f32, F32_THREADS);
            return Ok(Self { entry, heads: threads / 32, threads, shared: 0 });
        }
        // A block of 32 heads reads each key once for all of them. Two such blocks fill the 228 KB of a multiprocessor.
        let two = heads > MMA_HEADS && choice::gpu(exec)?.is_some_and(|gpu| gpu.is_data_centre());
        let (entry, heads, shared) = if two {
            (SparseAttention::sparse_attention_heads_32, 2 * MMA_HEADS, TWO_GROUP_BYTES)
        } else {
            (SparseAttention::sparse_attention_heads_16, MMA_HEADS, ONE_GROUP_BYTES)
        };
        Ok(Self { entry, heads, threads: mma_threads(dim), shared })
    }
}

/// A block has all keys of a token.
fn whole(
    exec: &mut Exec,
    q: &Tensor,
    lists: &Lists<'_>,
    sink: &Tensor,
    batch: &RaggedBatch<'_>,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let ((tokens, heads, dim), dtype) = ((q.shape()[0], q.shape()[1], q.shape()[2]), q.dtype());
    let Lists { kv, rings, window, ring, entries, chosen, entry_pages, per_page, k } = *lists;
    let RaggedBatch { qo_indptr, positions, slots, page_tables } = *batch;
    let (rows, pages) = page_tables.rows_cols();
    let kernel = Whole::new(exec, dtype, heads, dim)?;
    let arguments = SparseAttention {
        q,
        kv,
        rings,
        entries,
        chosen,
        sink,
        qo_indptr,
        positions,
        slots,
        page_tables,
        out,
        rows,
        pages,
        slot_count: rings.shape()[0],
        window,
        ring,
        entry_pages,
        per_page,
        k,
        heads,
        dim,
        scale: (dim as f32).sqrt().recip(),
    };
    let grid = [tokens, heads.div_ceil(kernel.heads), 1];
    if grid.contains(&0) {
        return Ok(());
    }
    let launch = kernel.entry.launch(exec.gpu()?, OP, arguments)?.overlapped();
    // SAFETY: the op checked the shapes; the grid covers all tokens and heads.
    unsafe { launch.shared(kernel.shared).run(grid, kernel.threads) }
}

/// A block has a chunk of a token's keys, in bf16; [`merge`] has to follow.
fn split_keys(
    exec: &mut Exec,
    q: &Tensor,
    lists: &Lists<'_>,
    chunks: usize,
    batch: &RaggedBatch<'_>,
) -> Result<(), OpError> {
    let ((tokens, heads, dim), dtype) = ((q.shape()[0], q.shape()[1], q.shape()[2]), q.dtype());
    let Lists { kv, rings, window, ring, entries, chosen, entry_pages, per_page, k } = *lists;
    let RaggedBatch { qo_indptr, positions, slots, page_tables } = *batch;
    let ((rows, pages), slot_count) = (page_tables.rows_cols(), rings.shape()[0]);
    let partials = exec.gpu()?.workspace();
    let arguments = AttentionChunks {
        q,
        kv,
        rings,
        entries,
        chosen,
        qo_indptr,
        positions,
        slots,
        page_tables,
        partials,
        rows,
        pages,
        slot_count,
        window,
        ring,
        entry_pages,
        per_page,
        k,
        heads,
        dim,
        scale: (dim as f32).sqrt().recip(),
    };
    let (kernel, grid) = (AttentionChunks::sparse_attention_chunks, [tokens, heads.div_ceil(MMA_HEADS), chunks]);
    let early = [qo_indptr, positions, slots, page_tables];
    run_early(exec, OP, [kernel, kernel], dtype, arguments, &early, (grid, mma_threads(dim)))
}

/// Description of the lists of keys for [`merge`].
struct Merge {
    window: usize,
    per_page: usize,
    k: usize,
    chunks: usize,
}

/// Merges the chunks of [`split_keys`], rotates the output back, packs it, and writes the rings.
fn merge(
    exec: &mut Exec,
    Merge { window, per_page, k, chunks }: Merge,
    (kv, rings): (&Tensor, &mut Tensor),
    (sink, frequencies): (&Tensor, &Tensor),
    batch: &RaggedBatch<'_>,
    (out, split): (&mut Tensor, Option<Split<'_>>),
) -> Result<(), OpError> {
    let ((tokens, heads, dim), dtype) = ((out.shape()[0], out.shape()[1], out.shape()[2]), out.dtype());
    let RaggedBatch { qo_indptr, positions, slots, page_tables } = *batch;
    let (slot_count, ring) = (rings.shape()[0], rings.shape()[1]);
    let (packed, group) =
        split.map_or((Target::Scratch(0), dim), |split| (Target::Tensor(split.packed), split.columns));
    let arguments = MergeChunks {
        partials: exec.gpu()?.workspace(),
        sink,
        frequencies,
        kv,
        qo_indptr,
        positions,
        slots,
        out,
        packed,
        rings,
        rows: page_tables.rows_cols().0,
        slot_count,
        window,
        ring,
        per_page,
        k,
        heads,
        dim,
        chunks,
        pairs: frequencies.elements(),
        group,
    };
    let kernel = MergeChunks::sparse_attention_merge;
    let early = [sink, frequencies, qo_indptr, positions, slots];
    run_early(exec, OP, [kernel, kernel], dtype, arguments, &early, ([tokens, heads + 1, 1], MERGE_THREADS))
}
