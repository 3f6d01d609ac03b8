//! The gated delta rule in chunks: the WY form, in which a chunk is a few GEMMs (Yang et al., arXiv 2406.06484 and
//! 2412.06464).
//!
//! With `G_i` the sum of the log decays up to token `i` of the chunk and `D_ij = exp(G_i - G_j)` for `j <= i`, the
//! corrections that the tokens write are the solution of a unit lower triangular system,
//!
//! ```text
//! (I + A) U = beta V           A_ij = beta_i (k_i . k_j) D_ij for j < i, else 0
//! (I + A) W = beta exp(G) K
//! N = U - W S^T                S: the state before the chunk, [value_dim, key_dim]
//! O_i = exp(G_i) S q_i + sum over j <= i of (q_i . k_j) D_ij N_j
//! S'  = exp(G_last) S + sum over j of exp(G_last - G_j) N_j k_j^T
//! ```
//!
//! All exponents are at most 0. A CUDA kernel inverts `I + A`; forward substitution gives the same without an inverse.

use super::call::{Call, Gates, axpy, dot};
use crate::cpu::lanes::{Kernel, Lanes};
use crate::delta::Segment;

/// Tokens of a chunk; the last one of a segment may have fewer.
const CHUNK: usize = 64;

/// All segments of one head.
pub(super) struct Head<'a> {
    pub call: &'a Call<'a>,
    pub head: usize,
}

/// Scratch memory of one chunk.
struct ChunkScratch {
    /// Running sums of the log decays, `[CHUNK]`.
    g: [f32; CHUNK],
    /// `U`, then `N`, `[CHUNK, value_dim]`.
    u: Vec<f32>,
    /// `W`, `[CHUNK, key_dim]`.
    w: Vec<f32>,
}

impl Kernel for Head<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let Self { call, head } = self;
        let shape = call.inputs.shape;
        let len = shape.value_dim * shape.key_dim;
        let mut scratch = ChunkScratch {
            g: [0.0; CHUNK],
            u: vec![0.0; CHUNK * shape.value_dim],
            w: vec![0.0; CHUNK * shape.key_dim],
        };
        let mut unkept = Vec::new();
        for segment in Segment::unpack(call.inputs.segments) {
            // SAFETY: this head's matrices of every slot belong to this task, and `state` is dropped before the next
            // segment.
            let state = unsafe { call.begin(&segment, head, 0..len, &mut unkept) };
            let tokens = segment.tokens();
            for first in tokens.clone().step_by(CHUNK) {
                let n = CHUNK.min(tokens.end - first);
                self.solve(s, first, n, &mut scratch);
                self.read(s, first, n, &mut scratch, state);
                self.write(s, first, n, &scratch, state);
            }
        }
    }
}

impl Head<'_> {
    fn gates(&self, token: usize) -> Gates {
        self.call.gates(token, self.head)
    }

    /// Fills the scratch memory with `G`, `U` and `W` by forward substitution.
    #[inline(always)]
    fn solve<S: Lanes>(&self, s: S, first: usize, n: usize, scratch: &mut ChunkScratch) {
        let (key_dim, value_dim) = (self.call.inputs.shape.key_dim, self.call.inputs.shape.value_dim);
        let mut g = 0.0;
        for i in 0..n {
            let [log_decay, _, beta] = self.gates(first + i);
            g += log_decay;
            scratch.g[i] = g;
            let key = self.call.query_key(first + i, self.head).1;
            let (u_done, u) = scratch.u.split_at_mut(i * value_dim);
            let (w_done, w) = scratch.w.split_at_mut(i * key_dim);
            let (u, w) = (&mut u[..value_dim], &mut w[..key_dim]);
            for (u, value) in u.iter_mut().zip(self.call.value(first + i, self.head)) {
                *u = beta * value.to_f32();
            }
            w.fill(0.0);
            axpy(s, beta * g.exp(), key, w);
            for j in 0..i {
                let other = self.call.query_key(first + j, self.head).1;
                let a = beta * dot(s, key, other) * (g - scratch.g[j]).exp();
                axpy(s, -a, &u_done[j * value_dim..][..value_dim], u);
                axpy(s, -a, &w_done[j * key_dim..][..key_dim], w);
            }
        }
    }

    /// Turns `U` into `N` and writes the output of the chunk.
    #[inline(always)]
    fn read<S: Lanes>(&self, s: S, first: usize, n: usize, scratch: &mut ChunkScratch, state: &[f32]) {
        let shape = self.call.inputs.shape;
        for i in 0..n {
            let w = &scratch.w[i * shape.key_dim..][..shape.key_dim];
            let u = &mut scratch.u[i * shape.value_dim..][..shape.value_dim];
            for (u, row) in u.iter_mut().zip(state.chunks_exact(shape.key_dim)) {
                *u -= dot(s, row, w);
            }
            let at = (first + i) * shape.v_width() + self.head * shape.value_dim;
            // SAFETY: these columns of the output belong to this task.
            let out = unsafe { self.call.out.slice(at, shape.value_dim) };
            let query = self.call.query_key(first + i, self.head).0;
            let decay = scratch.g[i].exp();
            for (out, row) in out.iter_mut().zip(state.chunks_exact(shape.key_dim)) {
                *out = decay * dot(s, row, query);
            }
            for j in 0..=i {
                let key = self.call.query_key(first + j, self.head).1;
                let weight = dot(s, query, key) * (scratch.g[i] - scratch.g[j]).exp();
                axpy(s, weight, &scratch.u[j * shape.value_dim..][..shape.value_dim], out);
            }
        }
    }

    /// Updates the state by the chunk (the inter-chunk scan).
    #[inline(always)]
    fn write<S: Lanes>(&self, s: S, first: usize, n: usize, scratch: &ChunkScratch, state: &mut [f32]) {
        let shape = self.call.inputs.shape;
        let last = scratch.g[n - 1];
        for (i, row) in state.chunks_exact_mut(shape.key_dim).enumerate() {
            row.iter_mut().for_each(|x| *x *= last.exp());
            for j in 0..n {
                let key = self.call.query_key(first + j, self.head).1;
                axpy(s, (last - scratch.g[j]).exp() * scratch.u[j * shape.value_dim + i], key, row);
            }
        }
    }
}
