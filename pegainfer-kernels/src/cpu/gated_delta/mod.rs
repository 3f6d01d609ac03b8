//! CPU twins of `ops::gated_delta_rule` and `ops::gated_delta_chunks`.
//!
//! Both begin alike: [`prepare`] normalises queries and keys and computes the gates of every token, in f32. Then each head
//! runs through the segments of the step in order, [`recurrent`] token by token or [`chunked`] in blocks of tokens. Heads
//! share nothing, so they are the tasks.

mod chunked;
mod recurrent;

use super::disjoint::Disjoint;
use super::isa::Isa;
use super::lanes::{Kernel, Lanes, dispatch};
use super::rows::per_task;
use crate::delta::{DeltaShape, NO_STATE, Segment};
use half::bf16;
use pegainfer_core::scratch::Scratch;
use rayon::prelude::*;
use std::ops::Range;

/// Of the normalisation of queries and keys.
const L2_EPS: f32 = 1e-6;
/// Below this many multiply-adds, handing work to another thread costs more than it saves.
const TASK_WORK: usize = 1 << 17;

/// Operands that are only read; see the ops.
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
    /// Heads.
    pub shape: DeltaShape,
}

/// How the rule is computed; the results are the same but for rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Token by token: the bits do not depend on how a sequence is cut into segments.
    Recurrent,
    /// In chunks of 64 tokens from the beginning of each segment.
    Chunked,
}

/// See the ops; segments were checked. `states`: `[slots, value_heads, value_dim, key_dim]`, `out`: `[tokens, v_width]`.
pub fn run(isa: Isa, form: Form, inputs: &Inputs<'_>, scratch: &mut Scratch, states: &mut [f32], out: &mut [f32]) {
    let shape = inputs.shape;
    assert!(shape.is_supported(), "{shape:?}");
    let tokens = out.len() / shape.v_width();
    let (qk_len, gates_len) = (tokens * 2 * shape.k_width(), tokens * shape.value_heads);
    let (qk, gates) = scratch.slice::<f32>(qk_len + 3 * gates_len).split_at_mut(qk_len);
    let gates = gates.as_chunks_mut().0;
    prepare(isa, inputs, qk, gates);
    let shared = (Disjoint::new(states), Disjoint::new(out));
    let call = &Call { inputs, qk, gates, states: shared.0, out: shared.1 };
    let tasks_per_head = if form == Form::Recurrent { shape.value_dim / recurrent::ROWS } else { 1 };
    let work = 4 * tokens * shape.key_dim * shape.value_dim / tasks_per_head;
    let tasks = (0..shape.value_heads * tasks_per_head).into_par_iter().with_min_len((TASK_WORK / work.max(1)).max(1));
    tasks.for_each(|task| {
        let (head, part) = (task / tasks_per_head, task % tasks_per_head);
        match form {
            Form::Recurrent => dispatch(isa, recurrent::Rows { call, head, first: part * recurrent::ROWS }),
            Form::Chunked => dispatch(isa, chunked::Head { call, head }),
        }
    });
}

/// What the tasks of a call share.
struct Call<'a> {
    inputs: &'a Inputs<'a>,
    /// Normalised queries (scaled by `key_dim^-1/2`), then keys, `[tokens, 2, key_heads, key_dim]`.
    qk: &'a [f32],
    /// `[tokens, value_heads]`.
    gates: &'a [Gates],
    states: Disjoint<'a, f32>,
    out: Disjoint<'a, f32>,
}

/// Of one token and head: the logarithm of the decay, the decay, the write strength.
type Gates = [f32; 3];

impl Call<'_> {
    /// Query and key of a token for a value head.
    #[inline(always)]
    fn query_key(&self, token: usize, head: usize) -> (&[f32], &[f32]) {
        let DeltaShape { key_heads, key_dim, .. } = self.inputs.shape;
        let (q, k) =
            self.qk[token * 2 * key_heads * key_dim..][..2 * key_heads * key_dim].split_at(key_heads * key_dim);
        let at = head / self.inputs.shape.group() * key_dim;
        (&q[at..][..key_dim], &k[at..][..key_dim])
    }

    /// Value of a token for a value head.
    #[inline(always)]
    fn value(&self, token: usize, head: usize) -> &[bf16] {
        let shape = self.inputs.shape;
        let at = token * shape.channels() + 2 * shape.k_width() + head * shape.value_dim;
        &self.inputs.mixed[at..][..shape.value_dim]
    }

    /// Gates of a token for a value head.
    #[inline(always)]
    fn gates(&self, token: usize, head: usize) -> Gates {
        self.gates[token * self.inputs.shape.value_heads + head]
    }

    /// Elements `part` of a head's matrix as they are before a segment, for it to update: in the slot that it goes to, or
    /// in `room` if its state is not kept.
    ///
    /// # Safety
    /// This part of every slot belongs to the task, and none of it is in use.
    #[inline(always)]
    unsafe fn begin<'b>(
        &'b self,
        segment: &Segment,
        head: usize,
        part: Range<usize>,
        room: &'b mut Vec<f32>,
    ) -> &'b mut [f32] {
        let shape = self.inputs.shape;
        let len = shape.value_dim * shape.key_dim;
        let at = |slot: u32| (slot as usize * shape.value_heads + head) * len + part.start;
        let state = if segment.to == NO_STATE {
            room.resize(part.len(), 0.0);
            &mut room[..]
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

/// Fills [`Call::qk`] and [`Call::gates`].
fn prepare(isa: Isa, inputs: &Inputs<'_>, qk: &mut [f32], gates: &mut [Gates]) {
    let (width, heads) = (2 * inputs.shape.k_width(), inputs.shape.value_heads);
    let tokens = per_task(6 * width);
    let parts = qk.par_chunks_mut(tokens * width).zip(gates.par_chunks_mut(tokens * heads)).enumerate();
    parts.for_each(|(part, (qk, gates))| dispatch(isa, Tokens { inputs, first: part * tokens, qk, gates }));
}

/// Some tokens of [`prepare`].
struct Tokens<'a> {
    inputs: &'a Inputs<'a>,
    first: usize,
    qk: &'a mut [f32],
    gates: &'a mut [Gates],
}

impl Kernel for Tokens<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let shape = self.inputs.shape;
        let width = 2 * shape.k_width();
        let rows = self.qk.chunks_exact_mut(width).zip(self.gates.chunks_exact_mut(shape.value_heads));
        for (token, (qk, gates)) in (self.first..).zip(rows) {
            let heads = self.inputs.mixed[token * shape.channels()..][..width].chunks_exact(shape.key_dim);
            for (i, (x, to)) in heads.zip(qk.chunks_exact_mut(shape.key_dim)).enumerate() {
                let scale = if i < shape.key_heads { (shape.key_dim as f32).sqrt().recip() } else { 1.0 };
                normalise(s, x, scale, to);
            }
            let [_, b, a] = shape.gates();
            let row = &self.inputs.projected[token * shape.projected_width()..][..shape.projected_width()];
            for (head, gates) in gates.iter_mut().enumerate() {
                let (b, a) = (row[b + head].to_f32(), row[a + head].to_f32());
                let g = -self.inputs.a_log[head].exp() * softplus(a + self.inputs.dt_bias[head]);
                *gates = [g, g.exp(), 1.0 / (1.0 + (-b).exp())];
            }
        }
    }
}

/// `out = x * rsqrt(Σ x² + 1e-6) * scale`.
#[inline(always)]
fn normalise<S: Lanes>(s: S, x: &[bf16], scale: f32, out: &mut [f32]) {
    let mut squares = s.splat(0.0);
    for x in x.as_chunks().0 {
        let x = s.widen(x);
        squares = s.fma(x, x, squares);
    }
    let scale = s.splat((s.sum(squares) + L2_EPS).sqrt().recip() * scale);
    for (x, out) in x.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        s.store(s.mul(s.widen(x), scale), out);
    }
}

/// `ln(1 + exp(x))`; x itself where adding 1 would change nothing.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// `Σ a[i] b[i]`, a multiple of 16 elements.
#[inline(always)]
fn dot<S: Lanes>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let mut sum = s.splat(0.0);
    for (a, b) in a.as_chunks().0.iter().zip(b.as_chunks().0) {
        sum = s.fma(s.load(a), s.load(b), sum);
    }
    s.sum(sum)
}

/// `y += alpha x`, a multiple of 16 elements.
#[inline(always)]
fn axpy<S: Lanes>(s: S, alpha: f32, x: &[f32], y: &mut [f32]) {
    let alpha = s.splat(alpha);
    for (x, y) in x.as_chunks().0.iter().zip(y.as_chunks_mut().0) {
        let sum = s.fma(alpha, s.load(x), s.load(y));
        s.store(sum, y);
    }
}
