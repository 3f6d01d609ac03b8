//! Reference kernel of `ops::gated_qk_norm_rope_write_kv`.

use super::isa::Isa;
use super::kv_cache::KvWriter;
use super::lanes::{Kernel, Lanes, chunk, chunk_mut, dispatch};
use super::norm::Scale;
use super::rows::per_task;
use crate::heads::{HeadShape, MAX_HEAD_DIM};
use half::bf16;
use pegainfer_core::kv::NO_SLOT;
use pegainfer_core::team;

/// Read-only operands; see the op.
pub struct Inputs<'a> {
    /// `[tokens, gated_qkv_width]`.
    pub projected: &'a [bf16],
    /// Query and key norm weights, `[head_dim]`.
    pub norms: (&'a [f32], &'a [f32]),
    /// `[positions, rotary_dim]`.
    pub rope: &'a [f32],
    /// Leading elements of a head that are rotated, a multiple of 32.
    pub rotary_dim: usize,
    /// `[tokens, axes]`.
    pub positions: &'a [u32],
    /// 1, or 3: frequency `i` then rotates by position `i % 3` of the token.
    pub axes: usize,
    /// `[tokens]`, distinct except for `NO_SLOT`.
    pub slots: &'a [u32],
    /// Head counts and sizes.
    pub shape: HeadShape,
    /// Epsilon of the norms.
    pub eps: f32,
}

/// Reference kernel of `ops::gated_qk_norm_rope_write_kv`, with checked slots and positions.
pub fn run(isa: Isa, inputs: &Inputs<'_>, q: &mut [bf16], cache: &KvWriter<'_>) {
    let shape = inputs.shape;
    assert!(shape.is_supported() && inputs.rotary_dim.is_multiple_of(32), "{shape:?}");
    let tokens = per_task(2 * shape.gated_qkv_width() * size_of::<bf16>());
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
        let Inputs { projected, norms, rope, rotary_dim, positions, axes, slots, shape, eps } = *self.inputs;
        let HeadShape { heads, kv_heads, head_dim } = shape;
        let mut key = [bf16::ZERO; MAX_HEAD_DIM];
        let key = &mut key[..head_dim];
        let mut interleaved = [0.0; MAX_HEAD_DIM];
        for (t, q) in (self.first..).zip(self.q.chunks_exact_mut(shape.q_width())) {
            let row = &projected[t * shape.gated_qkv_width()..][..shape.gated_qkv_width()];
            let rope = match axes {
                1 => &rope[positions[t] as usize * rotary_dim..][..rotary_dim],
                _ => {
                    interleave(rope, &positions[t * axes..][..axes], &mut interleaved[..rotary_dim]);
                    &interleaved[..rotary_dim]
                }
            };
            for (x, out) in row.chunks_exact(2 * head_dim).zip(q.chunks_exact_mut(head_dim)) {
                norm_rope(s, &x[..head_dim], norms.0, eps, rope, out);
            }
            if slots[t] == NO_SLOT {
                continue;
            }
            let slot = slots[t] as usize;
            for h in 0..kv_heads {
                norm_rope(s, &row[(2 * heads + h) * head_dim..][..head_dim], norms.1, eps, rope, key);
                let value = &row[(2 * heads + kv_heads + h) * head_dim..][..head_dim];
                // SAFETY: slots are distinct, so this one belongs to this token alone; the cache is not read now.
                unsafe { self.cache.write(shape, slot, h, key, value) };
            }
        }
    }
}

/// Cosines and sines of a token: those of frequency `i` are of position `i % 3`.
fn interleave(table: &[f32], positions: &[u32], rope: &mut [f32]) {
    let (width, half) = (rope.len(), rope.len() / 2);
    for i in 0..half {
        let row = &table[positions[i % positions.len()] as usize * width..][..width];
        (rope[i], rope[half + i]) = (row[i], row[half + i]);
    }
}

/// One head: RMS norm, then the half-split rotation of the leading elements; f32 with one rounding.
#[inline(always)]
fn norm_rope<S: Lanes>(s: S, x: &[bf16], weight: &[f32], eps: f32, rope: &[f32], out: &mut [bf16]) {
    let (rotary_dim, half) = (rope.len(), rope.len() / 2);
    let scale = Scale::of_row(s, x, eps);
    for low in (0..half).step_by(16) {
        let high = half + low;
        let (a, b) = (normed(s, scale, x, weight, low), normed(s, scale, x, weight, high));
        let (cos, sin) = (s.load(chunk(&rope[low..])), s.load(chunk(&rope[high..])));
        s.narrow(s.sub(s.mul(a, cos), s.mul(b, sin)), chunk_mut(&mut out[low..]));
        s.narrow(s.add(s.mul(b, cos), s.mul(a, sin)), chunk_mut(&mut out[high..]));
    }
    for at in (rotary_dim..x.len()).step_by(16) {
        s.narrow(normed(s, scale, x, weight, at), chunk_mut(&mut out[at..]));
    }
}

/// Sixteen elements of the norm, from `at` on.
#[inline(always)]
fn normed<S: Lanes>(s: S, scale: Scale, x: &[bf16], weight: &[f32], at: usize) -> S::V {
    scale.exact(s, s.widen(chunk(&x[at..])), s.load(chunk(&weight[at..])))
}
