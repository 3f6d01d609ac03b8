//! Operands and intermediate values of one call.

use crate::cpu::disjoint::Disjoint;
use crate::cpu::lanes::Lanes;
use crate::delta::{DeltaShape, NO_STATE, Segment};
use half::bf16;
use std::ops::Range;

/// Read-only operands; see the ops.
pub struct Inputs<'a> {
    /// Output of the convolution, `[tokens, channels]`.
    pub mixed: &'a [bf16],
    /// `[tokens, projected_width]`.
    pub projected: &'a [bf16],
    /// `[value_heads]`.
    pub a_log: &'a [f32],
    /// `[value_heads]`.
    pub dt_bias: &'a [f32],
    /// `[segments, SEGMENT_WORDS]`, checked.
    pub segments: &'a [u32],
    /// Head counts and sizes.
    pub shape: DeltaShape,
}

/// Operands and intermediate values that the tasks of one call share.
pub(super) struct Call<'a> {
    pub inputs: &'a Inputs<'a>,
    /// Normalised queries (scaled by `key_dim^-1/2`), then keys, `[tokens, 2, key_heads, key_dim]`.
    pub qk: &'a [f32],
    /// `[tokens, value_heads]`.
    pub gates: &'a [Gates],
    pub states: Disjoint<'a, f32>,
    pub out: Disjoint<'a, f32>,
}

/// Gates of one token and head: the logarithm of the decay, the decay, and beta (the write strength).
pub(super) type Gates = [f32; 3];

impl Call<'_> {
    /// Query and key of a token for a value head.
    #[inline(always)]
    pub fn query_key(&self, token: usize, head: usize) -> (&[f32], &[f32]) {
        let DeltaShape { key_heads, key_dim, .. } = self.inputs.shape;
        let (q, k) =
            self.qk[token * 2 * key_heads * key_dim..][..2 * key_heads * key_dim].split_at(key_heads * key_dim);
        let at = head / self.inputs.shape.group() * key_dim;
        (&q[at..][..key_dim], &k[at..][..key_dim])
    }

    /// Value of a token for a value head.
    #[inline(always)]
    pub fn value(&self, token: usize, head: usize) -> &[bf16] {
        let shape = self.inputs.shape;
        let at = token * shape.channels() + 2 * shape.k_width() + head * shape.value_dim;
        &self.inputs.mixed[at..][..shape.value_dim]
    }

    /// Gates of a token for a value head.
    #[inline(always)]
    pub fn gates(&self, token: usize, head: usize) -> Gates {
        self.gates[token * self.inputs.shape.value_heads + head]
    }

    /// The `part` of a head's matrix before a segment, to be updated: in the slot that it goes to, or in `scratch` if
    /// its state is not kept.
    ///
    /// # Safety
    /// This part of every slot belongs to the task, and no other reference to it exists.
    #[inline(always)]
    pub unsafe fn begin<'b>(
        &'b self,
        segment: &Segment,
        head: usize,
        part: Range<usize>,
        scratch: &'b mut Vec<f32>,
    ) -> &'b mut [f32] {
        let shape = self.inputs.shape;
        let len = shape.value_dim * shape.key_dim;
        let at = |slot: u32| (slot as usize * shape.value_heads + head) * len + part.start;
        let state = if segment.to == NO_STATE {
            scratch.resize(part.len(), 0.0);
            &mut scratch[..]
        } else {
            // SAFETY: the caller's promise.
            unsafe { self.states.slice(at(segment.to), part.len()) }
        };
        if segment.from == NO_STATE {
            state.fill(0.0);
        } else if segment.from != segment.to {
            // SAFETY: as above; another slot than that of `state`.
            state.copy_from_slice(unsafe { self.states.slice(at(segment.from), part.len()) });
        }
        state
    }
}

/// `Σ a[i] b[i]`, a multiple of 16 elements.
#[inline(always)]
pub(super) fn dot<S: Lanes>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let mut sum = s.splat(0.0);
    for (a, b) in a.as_chunks().0.iter().zip(b.as_chunks().0) {
        sum = s.fma(s.load(a), s.load(b), sum);
    }
    s.sum(sum)
}

/// `y += alpha x`, a multiple of 16 elements.
#[inline(always)]
pub(super) fn axpy<S: Lanes>(s: S, alpha: f32, x: &[f32], y: &mut [f32]) {
    let alpha = s.splat(alpha);
    for (x, y) in x.as_chunks().0.iter().zip(y.as_chunks_mut().0) {
        let sum = s.fma(alpha, s.load(x), s.load(y));
        s.store(sum, y);
    }
}
