//! Reference kernel of `ops::qk_norm_rope_write_kv`.

use super::isa::Isa;
use super::kv_cache::KvWriter;
use super::lanes::{Binary, Kernel, Lanes, chunk, chunk_mut, dispatch};
use super::norm::Scale;
use super::rows::per_task;
use crate::heads::{HeadShape, MAX_HEAD_DIM};
use crate::rotary::RopeSpec;
use half::bf16;
use pegainfer_core::kv::NO_SLOT;
use pegainfer_core::team;

/// Read-only operands; see the op.
pub struct Inputs<'a> {
    /// `[tokens, qkv_width]`.
    pub qkv: &'a [bf16],
    /// QK norm, if the model has one.
    pub norms: Option<Norms<'a>>,
    /// `[positions, head_dim]`.
    pub rope: &'a [f32],
    /// `[tokens]`.
    pub positions: &'a [u32],
    /// `[tokens]`, distinct except for `NO_SLOT`.
    pub slots: &'a [u32],
    /// Head counts and sizes.
    pub shape: HeadShape,
}

/// The RMS norms of queries and of keys.
#[derive(Clone, Copy)]
pub struct Norms<'a> {
    /// Weight for queries, `[head_dim]`.
    pub q: &'a [bf16],
    /// Weight for keys, `[head_dim]`.
    pub k: &'a [bf16],
    /// Added to the mean of the squares.
    pub eps: f32,
}

/// Fills a RoPE table, see `ops::rope_table`.
pub fn fill_rope(table: &mut [f32], head_dim: usize, rope: &RopeSpec) {
    let half = head_dim / 2;
    let inverse: Vec<f32> = rope.frequencies(head_dim).into_iter().map(|f| f as f32).collect();
    let factor = rope.attention_factor as f32;
    team::for_each_chunk(table, head_dim, |position, row| {
        let (cos, sin) = row.split_at_mut(half);
        for ((cos, sin), f) in cos.iter_mut().zip(sin).zip(&inverse) {
            let (s, c) = (position as f32 * f).sin_cos();
            (*sin, *cos) = (s * factor, c * factor);
        }
    });
}

/// Reference kernel of `ops::qk_norm_rope_write_kv`, with checked slots and positions.
pub fn run(isa: Isa, inputs: &Inputs<'_>, q: &mut [bf16], cache: &KvWriter<'_>) {
    let shape = inputs.shape;
    assert!(shape.is_supported(), "{shape:?}");
    let tokens = per_task(2 * shape.qkv_width() * size_of::<bf16>());
    team::for_each_chunk(q, tokens * shape.q_width(), |part, q| {
        dispatch(isa, Tokens { inputs, first: part * tokens, q, cache });
    });
}

/// The tokens of [`run`] with rows in `q`.
struct Tokens<'a> {
    inputs: &'a Inputs<'a>,
    /// Index of the first token.
    first: usize,
    q: &'a mut [bf16],
    cache: &'a KvWriter<'a>,
}

impl Kernel for Tokens<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let Inputs { qkv, norms, rope, positions, slots, shape } = *self.inputs;
        let (q_norm, k_norm) = (norms.map(|n| (n.q, n.eps)), norms.map(|n| (n.k, n.eps)));
        let HeadShape { heads, kv_heads, head_dim } = shape;
        let mut key = [bf16::ZERO; MAX_HEAD_DIM];
        let key = &mut key[..head_dim];
        for (t, q) in (self.first..).zip(self.q.chunks_exact_mut(shape.q_width())) {
            let row = &qkv[t * shape.qkv_width()..][..shape.qkv_width()];
            let rope = &rope[positions[t] as usize * head_dim..][..head_dim];
            for (x, out) in row.chunks_exact(head_dim).zip(q.chunks_exact_mut(head_dim)) {
                norm_rope(s, x, q_norm, rope, out);
            }
            if slots[t] == NO_SLOT {
                continue;
            }
            let slot = slots[t] as usize;
            for h in 0..kv_heads {
                norm_rope(s, &row[(heads + h) * head_dim..][..head_dim], k_norm, rope, key);
                let value = &row[(heads + kv_heads + h) * head_dim..][..head_dim];
                // SAFETY: slots are distinct, so this one belongs to this token alone; the cache is not read now.
                unsafe { self.cache.write(shape, slot, h, key, value) };
            }
        }
    }
}

/// One head: optional RMS norm with weight and epsilon, then the half-split rotation in f32, each rounded to bf16.
#[inline(always)]
fn norm_rope<S: Lanes>(s: S, x: &[bf16], norm: Option<(&[bf16], f32)>, rope: &[f32], out: &mut [bf16]) {
    let half = x.len() / 2;
    #[expect(clippy::manual_map, reason = "a closure might be compiled without the instructions of the path")]
    let norm = match norm {
        Some((weight, eps)) => Some((weight, Scale::of_row(s, x, eps))),
        None => None,
    };
    for i in 0..half.div_ceil(16) {
        // The last vector of a ragged half overlaps the previous one and writes the same values again.
        let low = (16 * i).min(half - 16);
        let high = half + low;
        let (a, b) = (normed(s, x, low, norm), normed(s, x, high, norm));
        let (cos, sin) = (s.load(chunk(&rope[low..])), s.load(chunk(&rope[high..])));
        s.narrow(s.sub(s.mul(a, cos), s.mul(b, sin)), chunk_mut(&mut out[low..]));
        s.narrow(s.add(s.mul(b, cos), s.mul(a, sin)), chunk_mut(&mut out[high..]));
    }
}

/// The vector of a head from element `at` on, normalised if there is a norm.
#[inline(always)]
fn normed<S: Lanes>(s: S, x: &[bf16], at: usize, norm: Option<(&[bf16], Scale)>) -> S::V {
    let x = s.widen(chunk(&x[at..]));
    match norm {
        Some((weight, scale)) => s.round(scale.apply(s, x, s.widen(chunk(&weight[at..])))),
        None => x,
    }
}
