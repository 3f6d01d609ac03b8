//! Reference kernel of `ops::vision::segment_attention`.
//!
//! Head after head: its keys and values are widened into tiles of sixteen keys, then tiles of queries run in parallel,
//! each with an online softmax over the tiles of its segment. The order of all sums depends only on the segment, not on
//! the other segments or the threads.

use super::values::Value;
use crate::cpu::disjoint::Disjoint;
use crate::cpu::isa::Isa;
use crate::cpu::lanes::{Kernel, Lanes, chunk, chunk_mut, dispatch, exp2};
use pegainfer_core::scratch::Scratch;
use pegainfer_core::team;
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Keys of a tile.
const KEYS: usize = 16;
/// Queries of a task.
const QUERIES: usize = 4;
/// Largest number of values of a head.
pub const MAX_HEAD_DIM: usize = 128;

/// Numbers of a call.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Heads of queries, of keys and of values.
    pub heads: usize,
    /// Values of a head, at most [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
}

impl Shape {
    /// Values of a head in whole vectors.
    fn padded_dim(self) -> usize {
        self.head_dim.next_multiple_of(16)
    }
}

/// Keys and values of one head of one segment. The last tile is padded with zeros.
#[derive(Clone, Copy)]
struct Head<'a> {
    /// `[tiles, head_dim, KEYS]`.
    keys: &'a [f32],
    /// `[tiles * KEYS, padded_dim]`.
    values: &'a [f32],
}

/// Reference kernel of `ops::vision::segment_attention`. `qkv`: `[n, 3 heads head_dim]`; `out`: `[n, heads head_dim]`;
/// `segments` lie in `0..n` and do not overlap.
pub fn segment_attention<T: Value>(
    isa: Isa,
    qkv: &[T],
    segments: impl Iterator<Item = Range<usize>>,
    shape: Shape,
    out: &mut [T],
    scratch: &mut Scratch,
) {
    let width = shape.heads * shape.head_dim;
    for segment in segments.filter(|segment| !segment.is_empty()) {
        let rows = &qkv[3 * segment.start * width..3 * segment.end * width];
        let out = &mut out[segment.start * width..segment.end * width];
        let tiles = segment.len().div_ceil(KEYS);
        let (tile_keys, tile_values) = (KEYS * shape.head_dim, KEYS * shape.padded_dim());
        let (keys, values) = scratch.slice(tiles * (tile_keys + tile_values)).split_at_mut(tiles * tile_keys);
        for head in 0..shape.heads {
            team::for_each_chunk_pair((keys, tile_keys), (values, tile_values), |tile, keys, values| {
                pack(rows, (head, tile), shape, keys, values);
            });
            attend(isa, rows, head, shape, Head { keys, values }, out);
        }
    }
}

/// Widens one tile of keys and values of a head.
fn pack<T: Value>(rows: &[T], (head, tile): (usize, usize), shape: Shape, keys: &mut [f32], values: &mut [f32]) {
    let (width, head_dim) = (shape.heads * shape.head_dim, shape.head_dim);
    keys.fill(0.0);
    values.fill(0.0);
    for (j, row) in rows.chunks_exact(3 * width).skip(tile * KEYS).take(KEYS).enumerate() {
        let key = &row[width + head * head_dim..][..head_dim];
        key.iter().enumerate().for_each(|(d, x)| keys[d * KEYS + j] = x.widen());
        let value = &row[2 * width + head * head_dim..][..head_dim];
        values[j * shape.padded_dim()..].iter_mut().zip(value).for_each(|(to, x)| *to = x.widen());
    }
}

/// All queries of one head of a segment.
fn attend<T: Value>(isa: Isa, rows: &[T], head: usize, shape: Shape, packed: Head<'_>, out: &mut [T]) {
    let (width, head_dim) = (shape.heads * shape.head_dim, shape.head_dim);
    let (count, out) = (out.len() / width, Disjoint::new(out));
    team::for_each_range(count, QUERIES, |queries| {
        // The last task computes its last query several times.
        let row = |i: usize| (queries.start + i).min(queries.end - 1);
        let mut scaled = [[0.0; MAX_HEAD_DIM]; QUERIES];
        for (i, scaled) in scaled.iter_mut().enumerate() {
            let query = &rows[3 * row(i) * width + head * head_dim..][..head_dim];
            scaled.iter_mut().zip(query).for_each(|(to, x)| *to = x.widen() * shape.scale * LOG2_E);
        }
        let result = dispatch(isa, Tile { scaled: &scaled, packed, count, shape });
        for (i, query) in queries.enumerate() {
            // SAFETY: each query belongs to one task, and its head to this call.
            let out = unsafe { out.slice(query * width + head * head_dim, head_dim) };
            out.iter_mut().zip(&result[i]).for_each(|(to, x)| *to = T::narrow(*x));
        }
    });
}

/// A tile of queries against all keys of its segment.
struct Tile<'a> {
    /// Queries times the scale, in base 2.
    scaled: &'a [[f32; MAX_HEAD_DIM]; QUERIES],
    packed: Head<'a>,
    /// Keys of the segment.
    count: usize,
    shape: Shape,
}

impl Kernel for Tile<'_> {
    type Out = [[f32; MAX_HEAD_DIM]; QUERIES];

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) -> Self::Out {
        let Self { scaled, packed, count, shape } = self;
        let (padded, mut out) = (shape.padded_dim(), [[0.0; MAX_HEAD_DIM]; QUERIES]);
        let (mut largest, mut total) = ([f32::NEG_INFINITY; QUERIES], [0.0; QUERIES]);
        let tiles = packed.keys.chunks_exact(shape.head_dim * KEYS).zip(packed.values.chunks_exact(padded * KEYS));
        for (tile, (keys, values)) in tiles.enumerate() {
            let scores = scores(s, scaled, keys, shape.head_dim);
            let mut weights = [[0.0; KEYS]; QUERIES];
            let mut kept = [0.0; QUERIES];
            for i in 0..QUERIES {
                let score = s.first(scores[i], (count - tile * KEYS).min(KEYS), f32::NEG_INFINITY);
                let most = largest[i].max(s.largest(score));
                let weight = exp2(s, s.sub(score, s.splat(most)));
                s.store(weight, &mut weights[i]);
                kept[i] = first(s, exp2(s, s.splat(largest[i] - most)));
                total[i] = total[i] * kept[i] + s.sum(weight);
                largest[i] = most;
            }
            add_values(s, &weights, values, padded, &kept, &mut out);
        }
        for (out, total) in out.iter_mut().zip(total) {
            out.iter_mut().for_each(|x| *x /= total);
        }
        out
    }
}

/// Scores of each query against sixteen keys.
#[inline(always)]
fn scores<S: Lanes>(s: S, scaled: &[[f32; MAX_HEAD_DIM]; QUERIES], keys: &[f32], head_dim: usize) -> [S::V; QUERIES] {
    let mut scores = [s.splat(0.0); QUERIES];
    for (d, keys) in keys.chunks_exact(KEYS).enumerate().take(head_dim) {
        let keys = s.load(chunk(keys));
        for (score, query) in scores.iter_mut().zip(scaled) {
            *score = s.fma(s.splat(query[d]), keys, *score);
        }
    }
    scores
}

/// `out = kept out + weights · values`, for sixteen keys.
#[inline(always)]
fn add_values<S: Lanes>(
    s: S,
    weights: &[[f32; KEYS]; QUERIES],
    values: &[f32],
    padded: usize,
    kept: &[f32; QUERIES],
    out: &mut [[f32; MAX_HEAD_DIM]; QUERIES],
) {
    for at in (0..padded).step_by(16) {
        let mut sums = [s.splat(0.0); QUERIES];
        for i in 0..QUERIES {
            sums[i] = s.mul(s.load(chunk(&out[i][at..])), s.splat(kept[i]));
        }
        for key in 0..KEYS {
            let value = s.load(chunk(&values[key * padded + at..]));
            for i in 0..QUERIES {
                sums[i] = s.fma(s.splat(weights[i][key]), value, sums[i]);
            }
        }
        for i in 0..QUERIES {
            s.store(sums[i], chunk_mut(&mut out[i][at..]));
        }
    }
}

/// The first lane.
#[inline(always)]
fn first<S: Lanes>(s: S, v: S::V) -> f32 {
    let mut lanes = [0.0; 16];
    s.store(v, &mut lanes);
    lanes[0]
}
