//! Reference kernels of `ops::gated_delta_rule` and `ops::gated_delta_chunks`.
//!
//! Both start with [`prepare`], which normalises queries and keys and computes the gates of every token, in f32. Then
//! each head processes the segments of the step in order, [`recurrent`] token by token or [`chunked`] in chunks of
//! tokens. Heads are independent, so tasks never share a head's state.

mod call;
mod chunked;
mod recurrent;

use super::disjoint::Disjoint;
use super::isa::Isa;
use super::lanes::{Kernel, Lanes, dispatch};
use super::rows::per_task;
pub use call::Inputs;
use call::{Call, Gates};
use half::bf16;
use pegainfer_core::scratch::Scratch;
use pegainfer_core::team;

/// Epsilon of the normalisation of queries and keys.
const L2_EPS: f32 = 1e-6;
/// Below this many multiply-adds, handing work to another thread costs more than it saves.
const TASK_WORK: usize = 1 << 17;

/// Form in which the delta rule is computed; results differ only in rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Token by token: the bits do not depend on how a sequence is cut into segments.
    Recurrent,
    /// In chunks of 64 tokens from the start of each segment.
    Chunked,
}

/// Reference kernel of the ops, with checked segments. `states`: `[slots, value_heads, value_dim, key_dim]`, `out`:
/// `[tokens, v_width]`.
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
    team::for_each_range(shape.value_heads * tasks_per_head, TASK_WORK / work.max(1), |tasks| {
        for task in tasks {
            let (head, part) = (task / tasks_per_head, task % tasks_per_head);
            match form {
                Form::Recurrent => dispatch(isa, recurrent::Rows { call, head, first: part * recurrent::ROWS }),
                Form::Chunked => dispatch(isa, chunked::Head { call, head }),
            }
        }
    });
}

/// Fills [`Call::qk`] and [`Call::gates`].
fn prepare(isa: Isa, inputs: &Inputs<'_>, qk: &mut [f32], gates: &mut [Gates]) {
    let (width, heads) = (2 * inputs.shape.k_width(), inputs.shape.value_heads);
    let tokens = per_task(6 * width);
    team::for_each_chunk_pair((qk, tokens * width), (gates, tokens * heads), |part, qk, gates| {
        dispatch(isa, Tokens { inputs, first: part * tokens, qk, gates });
    });
}

/// Computes some of the tokens of [`prepare`].
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

/// `ln(1 + exp(x))`; x itself if adding 1 would change nothing.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}
