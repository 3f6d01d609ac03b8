//! CPU twin of `ops::qk_norm_rope_write_kv`.

use super::isa::Isa;
use super::lanes::{Binary, Kernel, Lanes, chunk, chunk_mut, dispatch};
use super::norm::Scale;
use super::rows::per_task;
use crate::ops::HeadShape;
use half::bf16;
use pegainfer_core::kv::BLOCK_SIZE;
use rayon::prelude::*;

/// Operands that are only read; see the op.
pub struct Inputs<'a> {
    /// `[tokens, qkv_width]`.
    pub qkv: &'a [bf16],
    /// Query and key norm weights, `[head_dim]`.
    pub norms: (&'a [bf16], &'a [bf16]),
    /// `[positions, head_dim]`.
    pub rope: &'a [f32],
    /// `[tokens]`.
    pub positions: &'a [u32],
    /// `[tokens]`, distinct.
    pub slots: &'a [u32],
    /// Heads.
    pub shape: HeadShape,
    /// Of the norms.
    pub eps: f32,
}

/// Largest supported head, elements.
const MAX_HEAD_DIM: usize = 256;

/// Fills a RoPE table, see `ops::rope_table`.
pub fn fill_rope(table: &mut [f32], head_dim: usize, theta: f64) {
    let half = head_dim / 2;
    let inverse: Vec<f32> = (0..half).map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64) as f32).collect();
    table.par_chunks_mut(head_dim).enumerate().for_each(|(position, row)| {
        let (cos, sin) = row.split_at_mut(half);
        for ((cos, sin), f) in cos.iter_mut().zip(sin).zip(&inverse) {
            (*sin, *cos) = (position as f32 * f).sin_cos();
        }
    });
}

/// The cache, written by several threads at once, each at the slots of its own tokens.
struct Cache {
    k: *mut bf16,
    v: *mut bf16,
}
// SAFETY: threads write to disjoint elements, because slots are distinct.
unsafe impl Sync for Cache {}

/// See `ops::qk_norm_rope_write_kv`; slots and positions were checked.
pub fn run(isa: Isa, inputs: &Inputs<'_>, q: &mut [bf16], k: &mut [bf16], v: &mut [bf16]) {
    let shape = inputs.shape;
    assert!(shape.head_dim <= MAX_HEAD_DIM, "head_dim {} is above {MAX_HEAD_DIM}", shape.head_dim);
    let tokens = per_task(2 * shape.qkv_width() * size_of::<bf16>());
    let cache = &Cache { k: k.as_mut_ptr(), v: v.as_mut_ptr() };
    let parts = q.par_chunks_mut(tokens * shape.q_width()).enumerate();
    parts.for_each(|(part, q)| dispatch(isa, Tokens { inputs, first: part * tokens, q, cache }));
}

/// Some tokens of [`run`], those of the rows of `q`.
struct Tokens<'a> {
    inputs: &'a Inputs<'a>,
    /// The first token.
    first: usize,
    q: &'a mut [bf16],
    cache: &'a Cache,
}

impl Kernel for Tokens<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let Inputs { qkv, norms, rope, positions, slots, shape, eps } = *self.inputs;
        let HeadShape { heads, kv_heads, head_dim } = shape;
        let mut key = [bf16::ZERO; MAX_HEAD_DIM];
        let key = &mut key[..head_dim];
        for (t, q) in (self.first..).zip(self.q.chunks_exact_mut(shape.q_width())) {
            let row = &qkv[t * shape.qkv_width()..][..shape.qkv_width()];
            let rope = &rope[positions[t] as usize * head_dim..][..head_dim];
            let (block, offset) = (slots[t] as usize / BLOCK_SIZE, slots[t] as usize % BLOCK_SIZE);
            for (x, out) in row.chunks_exact(head_dim).zip(q.chunks_exact_mut(head_dim)) {
                norm_rope(s, x, norms.0, eps, rope, out);
            }
            for h in 0..kv_heads {
                norm_rope(s, &row[(heads + h) * head_dim..][..head_dim], norms.1, eps, rope, key);
                let value = &row[(heads + kv_heads + h) * head_dim..][..head_dim];
                let base = (block * kv_heads + h) * head_dim * BLOCK_SIZE;
                // Stores of two bytes, but they hide behind the arithmetic of the next head: without them, a prefill of
                // 512 tokens takes as long (measured).
                for (d, key) in key.iter().enumerate() {
                    // SAFETY: the slot is inside the cache (checked by the op) and belongs to this token alone.
                    unsafe { *self.cache.k.add(base + d * BLOCK_SIZE + offset) = *key };
                }
                // SAFETY: as above; `value` and the cache do not overlap.
                unsafe {
                    std::ptr::copy_nonoverlapping(value.as_ptr(), self.cache.v.add(base + offset * head_dim), head_dim);
                }
            }
        }
    }
}

/// One head: RMS norm, then the half-split rotation in f32, each rounded to bf16.
#[inline(always)]
fn norm_rope<S: Lanes>(s: S, x: &[bf16], weight: &[bf16], eps: f32, rope: &[f32], out: &mut [bf16]) {
    let half = x.len() / 2;
    let scale = Scale::of_row(s, x, eps);
    for i in 0..half.div_ceil(16) {
        // The last vector of a ragged half overlaps the one before it, and writes the same values once more.
        let low = (16 * i).min(half - 16);
        let high = half + low;
        let a = s.round(scale.apply(s, s.widen(chunk(&x[low..])), s.widen(chunk(&weight[low..]))));
        let b = s.round(scale.apply(s, s.widen(chunk(&x[high..])), s.widen(chunk(&weight[high..]))));
        let (cos, sin) = (s.load(chunk(&rope[low..])), s.load(chunk(&rope[high..])));
        s.narrow(s.sub(s.mul(a, cos), s.mul(b, sin)), chunk_mut(&mut out[low..]));
        s.narrow(s.add(s.mul(b, cos), s.mul(a, sin)), chunk_mut(&mut out[high..]));
    }
}
