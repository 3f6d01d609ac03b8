//! The work item of paged attention: some query lines of one KV head of one sequence, against all the KV they see.
//!
//! A *line* is one query head of one token; the lines of an item are numbered `row * group + head_in_group`, so their
//! positions never decrease. Lines are independent of each other: each one sees the KV tiles of its own prefix in the
//! order of position, every dot product adds in the order of `head_dim` (or of position), and a position that a line
//! may not see adds nothing to it. That is why the bits of a line depend on nothing but its own inputs.

use half::bf16;

use super::lanes::{Lanes, exp2};
use super::{AttentionShape, BLOCK};

/// KV positions per online-softmax step, counted from position 0.
const TILE: usize = 4 * BLOCK;
const TILE_BLOCKS: usize = TILE / BLOCK;

/// Query lines per work item: enough to use a KV tile several times while it is in the L1 cache, few enough that a
/// short prompt still feeds all cores.
pub(crate) const ITEM_LINES: usize = 48;

/// Largest supported head dimension. A constant row stride lets the compiler address the broadcasts of a register tile
/// from one pointer.
pub(crate) const MAX_HEAD_DIM: usize = 256;

/// Rows a register tile may touch past the last line of an item.
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
    q: Vec<[f32; MAX_HEAD_DIM]>,
    /// `[lines][head_dim / 16][16]`: sum of `p * v`.
    acc: Vec<[f32; 16]>,
    /// Largest score so far.
    max: Vec<f32>,
    /// Sum of `p`, kept in 16 lanes until the end.
    sum: Vec<[f32; 16]>,
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
    fn load(&mut self, call: &Call<'_>, item: &Item<'_>) {
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

/// The lines `line..line + lines` of an item against one KV tile.
pub(crate) struct Tile<'a> {
    pub line: usize,
    pub lines: usize,
    /// Absolute position of line 0 of the item.
    position: usize,
    /// Absolute position of the first token of the KV tile.
    start: usize,
    /// `[head_dim]` rows of 16 tokens, per block.
    k: [&'a [[bf16; BLOCK]]; TILE_BLOCKS],
    /// `[16 tokens, head_dim / 16]` rows of 16 dimensions, per block.
    v: [&'a [[bf16; BLOCK]]; TILE_BLOCKS],
}

/// Computes one work item and writes its rows of `out`.
#[inline(always)]
pub(crate) fn run_item<S: Lanes>(s: S, call: &Call<'_>, item: &Item<'_>, scratch: &mut Scratch) {
    scratch.load(call, item);
    let group = call.shape.group();
    let lines = item.rows * group;
    let last = item.position + item.rows - 1;
    let block_rows = call.shape.head_dim; // rows of 16 elements in one head's part of a block
    for start in (0..=last).step_by(TILE) {
        let mut tile = Tile { line: 0, lines: 0, position: item.position, start, k: [&[]; 4], v: [&[]; 4] };
        for block in 0..TILE_BLOCKS.min((last - start) / BLOCK + 1) {
            let id = item.table[start / BLOCK + block] as usize;
            let at = (id * call.shape.kv_heads + item.kv_head) * block_rows;
            tile.k[block] = &call.k[at..at + block_rows];
            tile.v[block] = &call.v[at..at + block_rows];
        }
        for line in (0..lines).step_by(S::LINES) {
            tile.line = line;
            tile.lines = S::LINES.min(lines - line);
            if item.position + (line + tile.lines - 1) / group >= start {
                s.tile(call, &tile, scratch);
            }
        }
    }
    finish(call, item, scratch);
}

/// One online-softmax step for `tile.lines <= M` lines, `N` columns of 16 at a time. Lines past `tile.lines` are
/// computed on whatever is in the scratch and belong to nobody.
#[inline(always)]
pub(crate) fn run_tile<S: Lanes, const M: usize, const N: usize>(
    s: S,
    call: &Call<'_>,
    tile: &Tile<'_>,
    scratch: &mut Scratch,
) {
    let group = call.shape.group();
    let last_line = tile.line + tile.lines - 1;
    // Tokens of the KV tile that each line sees: positions up to and including its own.
    let mut seen = [0; M];
    for (i, seen) in seen.iter_mut().enumerate() {
        let position = tile.position + (tile.line + i).min(last_line) / group;
        *seen = (position + 1).saturating_sub(tile.start);
    }
    let mut p = [[f32::NEG_INFINITY; TILE]; M];
    scores::<S, M, N>(s, call, tile, scratch, &seen, &mut p);
    let alpha = softmax::<S, M>(s, tile, scratch, &mut p);
    accumulate::<S, M, N>(s, call, tile, scratch, &seen, &p, &alpha);
}

/// `p[i][t] = q[i] · k[t]` for the tokens that line `i` sees; the others stay -inf.
#[inline(always)]
fn scores<S: Lanes, const M: usize, const N: usize>(
    s: S,
    call: &Call<'_>,
    tile: &Tile<'_>,
    scratch: &Scratch,
    seen: &[usize; M],
    p: &mut [[f32; TILE]; M],
) {
    let head_dim = call.shape.head_dim;
    let q: &[[f32; MAX_HEAD_DIM]; M] = chunk(&scratch.q[tile.line..]);
    let blocks = seen[M - 1].div_ceil(BLOCK).min(TILE_BLOCKS);
    let mut block = 0;
    while block < blocks {
        if block + N <= blocks {
            let mut acc = [[s.splat(0.0); N]; M];
            multiply_add(s, &mut acc, q, 0..head_dim, *chunk(&tile.k[block..]), 1);
            store_seen(s, &acc, block, seen, p);
            block += N;
        } else {
            let mut acc = [[s.splat(0.0); 1]; M];
            multiply_add(s, &mut acc, q, 0..head_dim, [tile.k[block]], 1);
            store_seen(s, &acc, block, seen, p);
            block += 1;
        }
    }
}

/// Writes scores of `N` blocks, -inf where the line does not see the token.
#[inline(always)]
fn store_seen<S: Lanes, const M: usize, const N: usize>(
    s: S,
    acc: &[[S::V; N]; M],
    block: usize,
    seen: &[usize; M],
    p: &mut [[f32; TILE]; M],
) {
    for i in 0..M {
        for (j, to) in p[i].as_chunks_mut::<16>().0[block..][..N].iter_mut().enumerate() {
            let visible = seen[i].saturating_sub((block + j) * BLOCK).min(BLOCK);
            s.store(s.first(acc[i][j], visible, f32::NEG_INFINITY), to);
        }
    }
}

/// Turns scores into `2^(score - max)`, updates max and sum, and returns the factor by which each line's older sum
/// shrinks. A line that sees nothing of this tile gets p = 0 and a factor of exactly 1.
#[inline(always)]
fn softmax<S: Lanes, const M: usize>(
    s: S,
    tile: &Tile<'_>,
    scratch: &mut Scratch,
    p: &mut [[f32; TILE]; M],
) -> [f32; 16] {
    let (mut old, mut new) = ([0.0; 16], [0.0; 16]);
    for i in 0..M {
        let rows = p[i].as_chunks::<16>().0;
        let largest = rows.iter().fold(s.splat(f32::NEG_INFINITY), |m, row| s.max(s.load(row), m));
        let largest = s.largest(largest);
        old[i] = scratch.max[tile.line + i];
        new[i] = if largest > old[i] { largest } else { old[i] };
        scratch.max[tile.line + i] = new[i];
    }
    let mut alpha = [0.0; 16];
    s.store(exp2(s, s.sub(s.load(&old), s.load(&new))), &mut alpha);
    for i in 0..M {
        let max = s.splat(new[i]);
        let mut sum = s.splat(0.0);
        for row in p[i].as_chunks_mut::<16>().0 {
            let e = exp2(s, s.sub(s.load(row), max));
            s.store(e, row);
            sum = s.add(sum, e);
        }
        let total = &mut scratch.sum[tile.line + i];
        s.store(s.fma(s.load(total), s.splat(alpha[i]), sum), total);
    }
    alpha
}

/// `acc[i] = acc[i] * alpha[i] + Σ_t p[i][t] * v[t]` over the tokens that line `i` sees.
#[inline(always)]
fn accumulate<S: Lanes, const M: usize, const N: usize>(
    s: S,
    call: &Call<'_>,
    tile: &Tile<'_>,
    scratch: &mut Scratch,
    seen: &[usize; M],
    p: &[[f32; TILE]; M],
    alpha: &[f32; 16],
) {
    let columns = call.shape.head_dim / 16;
    let mut column = 0;
    while column < columns {
        if column + N <= columns {
            accumulate_columns::<S, M, N>(s, tile, scratch, seen, p, alpha, columns, column);
            column += N;
        } else {
            accumulate_columns::<S, M, 1>(s, tile, scratch, seen, p, alpha, columns, column);
            column += 1;
        }
    }
}

/// `accumulate` for the columns `column..column + N`, which stay in registers.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // one inner loop, cut out to be instantiated for two N
fn accumulate_columns<S: Lanes, const M: usize, const N: usize>(
    s: S,
    tile: &Tile<'_>,
    scratch: &mut Scratch,
    seen: &[usize; M],
    p: &[[f32; TILE]; M],
    alpha: &[f32; 16],
    columns: usize,
    column: usize,
) {
    let at = |i: usize, j: usize| (tile.line + i) * columns + column + j;
    let mut acc: [[S::V; N]; M] =
        std::array::from_fn(|i| std::array::from_fn(|j| s.mul(s.load(&scratch.acc[at(i, j)]), s.splat(alpha[i]))));
    for block in 0..seen[M - 1].div_ceil(BLOCK).min(TILE_BLOCKS) {
        let mut v = [tile.v[block]; N];
        for (j, v) in v.iter_mut().enumerate() {
            *v = &v[column + j..];
        }
        let first = block * BLOCK;
        // Positions never decrease with the line: line 0 sees the fewest tokens. What only some lines see is added to
        // those alone, because 0 * v is not nothing when v is not finite.
        let all = seen[0].saturating_sub(first).min(BLOCK);
        multiply_add(s, &mut acc, p, first..first + all, v, columns);
        for t in all..(seen[M - 1] - first).min(BLOCK) {
            let v = widen(s, &v, t * columns);
            for i in 0..M {
                if seen[i] > first + t {
                    let weight = s.splat(p[i][first + t]);
                    for j in 0..N {
                        acc[i][j] = s.fma(weight, v[j], acc[i][j]);
                    }
                }
            }
        }
    }
    for (i, line) in acc.into_iter().enumerate() {
        for (j, v) in line.into_iter().enumerate() {
            s.store(v, &mut scratch.acc[at(i, j)]);
        }
    }
}

/// `acc[i][j] += Σ_n a[i][steps.start + n] * b[j][n * stride]`, in the order of `n`: the inner loop of both products.
#[inline(always)]
fn multiply_add<S: Lanes, const M: usize, const N: usize, const LEN: usize>(
    s: S,
    acc: &mut [[S::V; N]; M],
    a: &[[f32; LEN]; M],
    steps: std::ops::Range<usize>,
    b: [&[[bf16; 16]]; N],
    stride: usize,
) {
    for (n, step) in steps.enumerate() {
        let columns = widen(s, &b, n * stride);
        for i in 0..M {
            let weight = s.splat(a[i][step]);
            for j in 0..N {
                acc[i][j] = s.fma(weight, columns[j], acc[i][j]);
            }
        }
    }
}

/// Row `row` of each matrix, widened.
#[inline(always)]
fn widen<S: Lanes, const N: usize>(s: S, rows: &[&[[bf16; 16]]; N], row: usize) -> [S::V; N] {
    // Not `array::from_fn`: its closure may stay a call, and then it is compiled without the path's instructions.
    let mut columns = [s.splat(0.0); N];
    for (column, rows) in columns.iter_mut().zip(rows) {
        *column = s.widen(&rows[row]);
    }
    columns
}

/// Divides by the sum of `p`, rounds once to bf16 (to nearest even) and writes the rows of `out`.
#[inline(always)]
fn finish(call: &Call<'_>, item: &Item<'_>, scratch: &Scratch) {
    let AttentionShape { heads, head_dim, .. } = call.shape;
    let group = call.shape.group();
    let columns = head_dim / 16;
    for line in 0..item.rows * group {
        let mut sum = scratch.sum[line];
        for half in [8, 4, 2, 1] {
            for lane in 0..half {
                sum[lane] += sum[lane + half];
            }
        }
        let head = (item.row + line / group) * heads + item.kv_head * group + line % group;
        // SAFETY: (token, query head) belongs to this item alone, see `Item`.
        let out = unsafe { call.out.row(head * head_dim, head_dim) };
        for (to, from) in out.iter_mut().zip(scratch.acc[line * columns..][..columns].as_flattened()) {
            *to = round(from / sum[0]);
        }
    }
}

/// f32 to bf16, to nearest even, without a branch so that the loop vectorises.
#[inline(always)]
fn round(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    bf16::from_bits(if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded })
}

/// The first `M` elements.
#[inline(always)]
fn chunk<T, const M: usize>(rows: &[T]) -> &[T; M] {
    match rows.first_chunk() {
        Some(chunk) => chunk,
        None => unreachable!("the scratch is padded by more than a register tile, and blocks are counted"),
    }
}

/// The output, written by all threads in disjoint pieces.
pub(crate) struct Output<'a> {
    first: *mut bf16,
    len: usize,
    owner: std::marker::PhantomData<&'a mut [bf16]>,
}

// SAFETY: an `Output` only hands out pieces that its users promise to be disjoint (see `row`).
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    pub(crate) fn new(out: &'a mut [bf16]) -> Self {
        Self { first: out.as_mut_ptr(), len: out.len(), owner: std::marker::PhantomData }
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
