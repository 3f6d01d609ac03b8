//! CPU twin of `ops::qk_norm_rope_write_kv`.

use super::norm::norm_row;
use crate::ops::HeadShape;
use half::bf16;
use pegainfer_core::isa::Isa;
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
pub fn run(_isa: Isa, inputs: &Inputs<'_>, q: &mut [bf16], k: &mut [bf16], v: &mut [bf16]) {
    let HeadShape { heads, kv_heads, head_dim } = inputs.shape;
    assert!(head_dim <= MAX_HEAD_DIM, "head_dim {head_dim} is above {MAX_HEAD_DIM}");
    let (width, q_width) = (inputs.shape.qkv_width(), inputs.shape.q_width());
    let cache = &Cache { k: k.as_mut_ptr(), v: v.as_mut_ptr() };
    let rows = q.par_chunks_mut(q_width).zip(inputs.qkv.par_chunks(width)).enumerate();
    rows.for_each(|(t, (q, row))| {
        let rope = &inputs.rope[inputs.positions[t] as usize * head_dim..][..head_dim];
        let (block, offset) = (inputs.slots[t] as usize / BLOCK_SIZE, inputs.slots[t] as usize % BLOCK_SIZE);
        for h in 0..heads {
            let at = h * head_dim..(h + 1) * head_dim;
            norm_rope(&row[at.clone()], inputs.norms.0, inputs.eps, rope, &mut q[at]);
        }
        let mut key = [bf16::ZERO; MAX_HEAD_DIM];
        for h in 0..kv_heads {
            let from = &row[(heads + h) * head_dim..][..head_dim];
            norm_rope(from, inputs.norms.1, inputs.eps, rope, &mut key[..head_dim]);
            let value = &row[(heads + kv_heads + h) * head_dim..][..head_dim];
            let base = (block * kv_heads + h) * head_dim * BLOCK_SIZE;
            for (d, key) in key[..head_dim].iter().enumerate() {
                // SAFETY: the slot is inside the cache (checked by the op) and belongs to this token alone.
                unsafe { *cache.k.add(base + d * BLOCK_SIZE + offset) = *key };
            }
            // SAFETY: as above; `value` and the cache do not overlap.
            unsafe {
                std::ptr::copy_nonoverlapping(value.as_ptr(), cache.v.add(base + offset * head_dim), head_dim);
            }
        }
    });
}

/// One head: RMS norm, then the half-split rotation.
fn norm_rope(x: &[bf16], weight: &[bf16], eps: f32, rope: &[f32], out: &mut [bf16]) {
    norm_row(x, weight, eps, out);
    let half = out.len() / 2;
    let (cos, sin) = rope.split_at(half);
    let (low, high) = out.split_at_mut(half);
    for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        let (a, b) = (low.to_f32(), high.to_f32());
        *low = bf16::from_f32(a * cos - b * sin);
        *high = bf16::from_f32(b * cos + a * sin);
    }
}
