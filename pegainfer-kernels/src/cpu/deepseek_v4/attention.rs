//! Reference kernel of `ops::deepseek_v4::sparse_attention`.

use super::matmul::dot;
use crate::cpu::isa::Isa;
use crate::cpu::lanes::{Kernel, Lanes, dispatch};
use half::bf16;
use std::borrow::Cow;

/// All heads of one token over its keys, which are also the values. `q` and `out`: `[heads, dim]`, `dim` a multiple of
/// 32; `sink`: `[heads]`. With `round`, probabilities are rounded to bf16 before the second GEMM, not in the sum.
pub fn attend(isa: Isa, q: &[f32], keys: &[Cow<'_, [f32]>], sink: &[f32], round: bool, out: &mut [f32]) {
    dispatch(isa, Attend { q, keys, sink, round, out });
}

struct Attend<'a> {
    q: &'a [f32],
    keys: &'a [Cow<'a, [f32]>],
    sink: &'a [f32],
    round: bool,
    out: &'a mut [f32],
}

impl Kernel for Attend<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let Self { q, keys, sink, round, out } = self;
        let dim = q.len() / sink.len();
        let scale = (dim as f32).sqrt().recip();
        let mut scores = vec![0.0; keys.len()];
        for ((q, sink), out) in q.chunks_exact(dim).zip(sink).zip(out.chunks_exact_mut(dim)) {
            let mut max = *sink;
            for (score, key) in scores.iter_mut().zip(keys) {
                *score = dot(s, q, key) * scale;
                max = max.max(*score);
            }
            // The sink is a score without a value.
            let mut sum = (sink - max).exp();
            out.fill(0.0);
            for (score, key) in scores.iter().zip(keys) {
                let p = (score - max).exp();
                sum += p;
                let p = s.splat(if round { bf16::from_f32(p).to_f32() } else { p });
                for (out, v) in out.as_chunks_mut::<16>().0.iter_mut().zip(key.as_chunks::<16>().0) {
                    s.store(s.fma(p, s.load(v), s.load(out)), out);
                }
            }
            out.iter_mut().for_each(|v| *v /= sum);
        }
    }
}
