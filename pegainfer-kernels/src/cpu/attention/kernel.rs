//! The work item of paged attention: some query lines of one KV head of one sequence, against all KV that they see.
//!
//! A *line* is one query head of one token. The lines of an item are numbered `row * group + head_in_group`, so their
//! positions never decrease. Lines are independent: each one sees the KV tiles of its own prefix in order of position,
//! every dot product adds in the order of `head_dim` (or of position), and a position that a line may not see adds
//! nothing to it. The bits of a line therefore depend only on its own inputs.
//!
//! Loops fill arrays in place where `array::from_fn` would read better, because its closure may not be inlined and is
//! then compiled without the instructions of the path.

use super::state::{Call, Item, LineState, finish};
use crate::cpu::kv_cache::KvElement;
use crate::cpu::lanes::{Lanes, chunk, exp2};
use crate::heads::BLOCK_SIZE;
use crate::heads::MAX_HEAD_DIM;

/// KV positions per online-softmax step, counted from position 0.
const TILE: usize = 4 * BLOCK_SIZE;
const TILE_BLOCKS: usize = TILE / BLOCK_SIZE;

/// One head's part of the blocks of one KV tile; blocks that the item does not see are empty.
#[derive(Clone, Copy)]
struct KvTile<'a, E> {
    /// Per block `[head_dim]` rows of 16 tokens, then its scales.
    k: [&'a [[E; BLOCK_SIZE]]; TILE_BLOCKS],
    /// Per block `[16 tokens, head_dim / 16]` rows of 16 dimensions, then its scales.
    v: [&'a [[E; BLOCK_SIZE]]; TILE_BLOCKS],
}

impl<'a, E: KvElement> KvTile<'a, E> {
    /// Looks up the blocks of the positions `start..` up to `last`.
    #[inline(always)]
    fn find(call: &Call<'a, E>, item: &Item<'_>, start: usize, last: usize) -> Self {
        let mut kv = Self { k: [&[]; TILE_BLOCKS], v: [&[]; TILE_BLOCKS] };
        let rows = call.shape.slab_rows(E::FORMAT);
        for block in 0..(last + 1).saturating_sub(start).div_ceil(BLOCK_SIZE).min(TILE_BLOCKS) {
            let id = item.table[start / BLOCK_SIZE + block] as usize;
            let at = call.shape.first_row(E::FORMAT, id, item.kv_head);
            kv.k[block] = &call.k[at..at + rows];
            kv.v[block] = &call.v[at..at + rows];
        }
        kv
    }

    /// Starts loading the first lines of each block. The hardware prefetcher follows once a block is being read, but
    /// cannot know where the next block is.
    #[inline(always)]
    fn prefetch<S: Lanes>(&self, s: S) {
        for block in self.k.iter().chain(&self.v) {
            block.iter().step_by(64 / size_of::<[E; BLOCK_SIZE]>()).take(16).for_each(|row| s.prefetch(row));
        }
    }
}

/// The lines `line..line + lines` of an item against one KV tile.
struct Tile<'a, E> {
    line: usize,
    lines: usize,
    /// Absolute position of line 0 of the item.
    position: usize,
    /// Absolute position of the first token of the KV tile.
    start: usize,
    kv: KvTile<'a, E>,
}

/// Computes one work item and writes its rows of `out`. Finally prefetches the first KV of the thread's `following`
/// item.
#[inline(always)]
pub(super) fn run_item<S: Lanes, E: KvElement>(
    s: S,
    call: &Call<'_, E>,
    item: &Item<'_>,
    following: Option<&Item<'_>>,
    state: &mut LineState<'_>,
) {
    state.load(call, item);
    let (group, position) = (call.shape.group(), item.position);
    let lines = item.rows * group;
    let last = position + item.rows - 1;
    let mut kv = KvTile::find(call, item, 0, last);
    for start in (0..=last).step_by(TILE) {
        let next = KvTile::find(call, item, start + TILE, last);
        next.prefetch(s);
        if let (true, Some(item)) = (start + TILE > last, following) {
            KvTile::find(call, item, 0, item.position + item.rows - 1).prefetch(s);
        }
        for line in (0..lines).step_by(largest_tile::<S>()) {
            let tile = Tile { line, lines: largest_tile::<S>().min(lines - line), position, start, kv };
            if position + (line + tile.lines - 1) / group >= start {
                smallest_fit(s, call, &tile, state);
            }
        }
        kv = next;
    }
    finish(s, call, item, state);
}

/// Query lines of the path's largest register tile.
const fn largest_tile<S: Lanes>() -> usize {
    match S::REGISTERS {
        32.. => 12,
        8.. => 6,
        _ => 2,
    }
}

/// Runs a register tile in the smallest instantiation that holds it. Accumulators, 16-column operands and one broadcast
/// fill the registers of the path.
#[inline(always)]
fn smallest_fit<S: Lanes, E: KvElement>(s: S, call: &Call<'_, E>, tile: &Tile<'_, E>, state: &mut LineState<'_>) {
    match (S::REGISTERS, tile.lines) {
        (32.., 0 | 1) => run_tile::<S, E, 1, 4>(s, call, tile, state),
        (32.., 2) => run_tile::<S, E, 2, 4>(s, call, tile, state),
        (32.., 3 | 4) => run_tile::<S, E, 4, 4>(s, call, tile, state),
        (32.., 5 | 6) => run_tile::<S, E, 6, 4>(s, call, tile, state),
        (32.., 7 | 8) => run_tile::<S, E, 8, 2>(s, call, tile, state),
        (32.., _) => run_tile::<S, E, 12, 2>(s, call, tile, state),
        (8.., 0 | 1) => run_tile::<S, E, 1, 2>(s, call, tile, state),
        (8.., 2) => run_tile::<S, E, 2, 2>(s, call, tile, state),
        (8.., 3 | 4) => run_tile::<S, E, 4, 1>(s, call, tile, state),
        (8.., _) => run_tile::<S, E, 6, 1>(s, call, tile, state),
        (_, 0 | 1) => run_tile::<S, E, 1, 1>(s, call, tile, state),
        (..) => run_tile::<S, E, 2, 1>(s, call, tile, state),
    }
}

/// The weights of one KV tile for `M` lines: scores at first, then `2^(score - max)`.
struct Weights<const M: usize> {
    p: [[f32; TILE]; M],
    /// Number of tokens of the tile that each line sees, up to and including its own position; never decreasing.
    seen: [usize; M],
    /// Number of blocks that some line sees; `p` is not set past them.
    blocks: usize,
    /// Factor by which each line's older sums are scaled.
    alpha: [f32; 16],
}

/// One online-softmax step for `tile.lines <= M` lines, `N` columns of 16 at a time. Lines past `tile.lines` are
/// computed on stale state and not stored.
#[inline(always)]
fn run_tile<S: Lanes, E: KvElement, const M: usize, const N: usize>(
    s: S,
    call: &Call<'_, E>,
    tile: &Tile<'_, E>,
    state: &mut LineState<'_>,
) {
    let group = call.shape.group();
    let last_line = tile.line + tile.lines - 1;
    let mut weights = Weights { p: [[0.0; TILE]; M], seen: [0; M], blocks: 0, alpha: [0.0; 16] };
    for (i, seen) in weights.seen.iter_mut().enumerate() {
        let position = tile.position + (tile.line + i).min(last_line) / group;
        *seen = (position + 1).saturating_sub(tile.start);
    }
    weights.blocks = weights.seen[M - 1].div_ceil(BLOCK_SIZE).min(TILE_BLOCKS);
    scores::<S, E, M, N>(s, call, tile, state, &mut weights);
    softmax(s, tile, state, &mut weights);
    scale_weights(s, call, tile, &mut weights);
    let columns = call.shape.head_dim / 16;
    let mut column = 0;
    while column < columns {
        if column + N <= columns {
            accumulate::<S, E, M, N>(s, columns, column, tile, state, &weights);
            column += N;
        } else {
            accumulate::<S, E, M, 1>(s, columns, column, tile, state, &weights);
            column += 1;
        }
    }
}

/// `p[i][t] = q[i] · k[t]` for tokens that line `i` sees, -inf for the others.
#[inline(always)]
fn scores<S: Lanes, E: KvElement, const M: usize, const N: usize>(
    s: S,
    call: &Call<'_, E>,
    tile: &Tile<'_, E>,
    state: &LineState<'_>,
    weights: &mut Weights<M>,
) {
    let head_dim = call.shape.head_dim;
    let q: &[[f32; MAX_HEAD_DIM]; M] = chunk(&state.q[tile.line..]);
    let mut block = 0;
    while block < weights.blocks {
        if block + N <= weights.blocks {
            let mut acc = [[s.splat(0.0); N]; M];
            let keys = *chunk(&tile.kv.k[block..]);
            multiply_add(s, &mut acc, q, 0..head_dim, keys, 1);
            apply_scales(s, &mut acc, keys, head_dim);
            store_seen(s, &acc, block, weights);
            block += N;
        } else {
            let mut acc = [[s.splat(0.0); 1]; M];
            let keys = [tile.kv.k[block]];
            multiply_add(s, &mut acc, q, 0..head_dim, keys, 1);
            apply_scales(s, &mut acc, keys, head_dim);
            store_seen(s, &acc, block, weights);
            block += 1;
        }
    }
}

/// Multiplies the scores of `N` blocks by the scales of their keys, if they have some.
#[inline(always)]
fn apply_scales<S: Lanes, E: KvElement, const M: usize, const N: usize>(
    s: S,
    acc: &mut [[S::V; N]; M],
    keys: [&[[E; 16]]; N],
    head_dim: usize,
) {
    for (j, keys) in keys.into_iter().enumerate() {
        if let Some(scales) = E::scales(s, keys, head_dim) {
            for acc in acc.iter_mut() {
                acc[j] = s.mul(acc[j], scales);
            }
        }
    }
}

/// Writes scores of `N` blocks, with -inf for tokens that the line does not see.
#[inline(always)]
fn store_seen<S: Lanes, const M: usize, const N: usize>(
    s: S,
    acc: &[[S::V; N]; M],
    block: usize,
    weights: &mut Weights<M>,
) {
    for (i, acc) in acc.iter().enumerate() {
        for (j, to) in weights.p[i].as_chunks_mut::<16>().0[block..][..N].iter_mut().enumerate() {
            let visible = weights.seen[i].saturating_sub((block + j) * BLOCK_SIZE).min(BLOCK_SIZE);
            s.store(s.first(acc[j], visible, f32::NEG_INFINITY), to);
        }
    }
}

/// Turns scores into weights and updates each line's maximum and sum. A line that sees nothing of this tile gets
/// exactly p = 0 and alpha = 1.
#[inline(always)]
fn softmax<S: Lanes, E: KvElement, const M: usize>(
    s: S,
    tile: &Tile<'_, E>,
    state: &mut LineState<'_>,
    weights: &mut Weights<M>,
) {
    let (mut old, mut new) = ([0.0; 16], [0.0; 16]);
    for i in 0..M {
        let rows = &weights.p[i].as_chunks::<16>().0[..weights.blocks];
        let largest = rows.iter().fold(s.splat(f32::NEG_INFINITY), |m, row| s.max(s.load(row), m));
        let largest = s.largest(largest);
        old[i] = state.max[tile.line + i];
        new[i] = if largest > old[i] { largest } else { old[i] };
        state.max[tile.line + i] = new[i];
    }
    s.store(exp2(s, s.sub(s.load(&old), s.load(&new))), &mut weights.alpha);
    for (i, &max) in new[..M].iter().enumerate() {
        let max = s.splat(max);
        let mut sum = s.splat(0.0);
        for row in &mut weights.p[i].as_chunks_mut::<16>().0[..weights.blocks] {
            let e = exp2(s, s.sub(s.load(row), max));
            s.store(e, row);
            sum = s.add(sum, e);
        }
        let total = &mut state.sum[tile.line + i];
        s.store(s.fma(s.load(total), s.splat(weights.alpha[i]), sum), total);
    }
}

/// Multiplies the weights by the scales of their values, if they have some. Weights of tokens that a line does not see
/// may become NaN: they are not used.
#[inline(always)]
fn scale_weights<S: Lanes, E: KvElement, const M: usize>(
    s: S,
    call: &Call<'_, E>,
    tile: &Tile<'_, E>,
    weights: &mut Weights<M>,
) {
    for (block, values) in tile.kv.v[..weights.blocks].iter().enumerate() {
        if let Some(scales) = E::scales(s, values, call.shape.head_dim) {
            for p in &mut weights.p {
                let row = &mut p.as_chunks_mut::<16>().0[block];
                s.store(s.mul(s.load(row), scales), row);
            }
        }
    }
}

/// `acc[i] = acc[i] * alpha[i] + Σ_t p[i][t] * v[t]` over the tokens that line `i` sees, for `N` of `columns` columns
/// of 16, from `column` on, which stay in registers.
#[inline(always)]
fn accumulate<S: Lanes, E: KvElement, const M: usize, const N: usize>(
    s: S,
    columns: usize,
    column: usize,
    tile: &Tile<'_, E>,
    state: &mut LineState<'_>,
    weights: &Weights<M>,
) {
    let Weights { p, seen, blocks, alpha } = weights;
    let at = |i: usize, j: usize| (tile.line + i) * columns + column + j;
    let mut acc = [[s.splat(0.0); N]; M];
    for (i, line) in acc.iter_mut().enumerate() {
        for (j, v) in line.iter_mut().enumerate() {
            *v = s.mul(s.load(&state.acc[at(i, j)]), s.splat(alpha[i]));
        }
    }
    for block in 0..*blocks {
        let mut v = [tile.kv.v[block]; N];
        for (j, v) in v.iter_mut().enumerate() {
            *v = &v[column + j..];
        }
        let first = block * BLOCK_SIZE;
        // Line 0 sees the fewest tokens. Tokens that only some lines see are added to those alone, because 0 * v is NaN
        // if v is not finite.
        let all = seen[0].saturating_sub(first).min(BLOCK_SIZE);
        multiply_add(s, &mut acc, p, first..first + all, v, columns);
        for t in all..(seen[M - 1] - first).min(BLOCK_SIZE) {
            let mut row = [s.splat(0.0); N];
            for (row, v) in row.iter_mut().zip(&v) {
                *row = E::widen(s, &v[t * columns]);
            }
            for i in 0..M {
                if seen[i] > first + t {
                    let weight = s.splat(p[i][first + t]);
                    for j in 0..N {
                        acc[i][j] = s.fma(weight, row[j], acc[i][j]);
                    }
                }
            }
        }
    }
    for (i, line) in acc.into_iter().enumerate() {
        for (j, v) in line.into_iter().enumerate() {
            s.store(v, &mut state.acc[at(i, j)]);
        }
    }
}

/// `acc[i][j] += Σ_n a[i][steps.start + n] * b[j][n * stride]`, in the order of `n`: the inner loop of both GEMMs.
#[inline(always)]
fn multiply_add<S: Lanes, E: KvElement, const M: usize, const N: usize, const LEN: usize>(
    s: S,
    acc: &mut [[S::V; N]; M],
    a: &[[f32; LEN]; M],
    steps: std::ops::Range<usize>,
    b: [&[[E; 16]]; N],
    stride: usize,
) {
    if steps.is_empty() {
        return;
    }
    // Bounds checks of the loop below, hoisted: inside it they would cost a third of the speed through register
    // pressure.
    assert!(steps.end <= LEN && b.iter().all(|b| (steps.len() - 1) * stride < b.len()));
    for (n, step) in steps.enumerate() {
        let mut columns = [s.splat(0.0); N];
        for (column, b) in columns.iter_mut().zip(&b) {
            // SAFETY: n < steps.len(), asserted above.
            *column = E::widen(s, unsafe { b.get_unchecked(n * stride) });
        }
        for i in 0..M {
            // SAFETY: step < steps.end <= LEN, asserted above.
            let weight = s.splat(unsafe { *a[i].get_unchecked(step) });
            for j in 0..N {
                acc[i][j] = s.fma(weight, columns[j], acc[i][j]);
            }
        }
    }
}
