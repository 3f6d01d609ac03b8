//! The gated delta rule token by token.

use super::call::{Call, dot};
use crate::cpu::lanes::{Kernel, Lanes};
use crate::delta::Segment;

/// Rows of a head's matrix that one task owns: 8 KiB of state at 128 columns, which stays in the L1 cache over all
/// tokens.
pub(super) const ROWS: usize = 16;

/// Rows `first..first + ROWS` of the matrix of one head, for every segment. A row is one element of the value: rows do
/// not depend on each other.
pub(super) struct Rows<'a> {
    pub call: &'a Call<'a>,
    pub head: usize,
    pub first: usize,
}

impl Kernel for Rows<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let Self { call, head, first } = self;
        let shape = call.inputs.shape;
        let rows = first * shape.key_dim..(first + ROWS) * shape.key_dim;
        let mut scratch = Vec::new();
        for segment in Segment::unpack(call.inputs.segments) {
            // SAFETY: these rows of every slot belong to this task, and `state` is dropped before the next segment.
            let state = unsafe { call.begin(&segment, head, rows.clone(), &mut scratch) };
            for token in segment.tokens() {
                // SAFETY: these columns of the output belong to this task.
                let out = unsafe { call.out.slice(token * shape.v_width() + head * shape.value_dim + first, ROWS) };
                self.step(s, token, state, out);
            }
        }
    }
}

impl Rows<'_> {
    /// One token: decay, correct by the difference between the value and the key's reading, read with the query.
    #[inline(always)]
    fn step<S: Lanes>(&self, s: S, token: usize, state: &mut [f32], out: &mut [f32]) {
        let Self { call, head, first } = *self;
        let (q, k) = call.query_key(token, head);
        let [_, decay, beta] = call.gates(token, head);
        let values = &call.value(token, head)[first..][..ROWS];
        let rows = state.chunks_exact_mut(call.inputs.shape.key_dim);
        for ((row, value), out) in rows.zip(values).zip(out) {
            let read = decay * dot(s, row, k);
            let delta = s.splat(beta * (value.to_f32() - read));
            let mut sum = s.splat(0.0);
            let columns = row.as_chunks_mut().0.iter_mut().zip(k.as_chunks().0).zip(q.as_chunks().0);
            for ((row, k), q) in columns {
                let updated = s.fma(s.load(k), delta, s.mul(s.load(row), s.splat(decay)));
                s.store(updated, row);
                sum = s.fma(updated, s.load(q), sum);
            }
            *out = s.sum(sum);
        }
    }
}
