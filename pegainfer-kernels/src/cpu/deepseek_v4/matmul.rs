//! Reference kernel of `ops::deepseek_v4::{matmul, grouped_matmul}`.

use crate::cpu::isa::Isa;
use crate::cpu::lanes::{Kernel, Lanes, dispatch};
use crate::cpu::weights::Weights;
use pegainfer_core::team;
use std::ops::Range;

/// Weight rows of a task.
const TASK_ROWS: usize = 16;

/// `out[i, j] = Σ over blocks b of (Σ over l in b of x[i, l] w[j, l]) · sw[j, b]`, f32 throughout. An output's bits
/// depend on its rows alone. `k` is a multiple of 32; `j` runs over `rows` of `w`.
pub fn matmul(isa: Isa, x: &[f32], w: Weights<'_>, rows: Range<usize>, k: usize, out: &mut [f32]) {
    let (m, n) = (x.len() / k, rows.len());
    // A task's output is columns of `out`; tasks write their own part of the transpose.
    let mut transposed = vec![0.0; m * n];
    team::for_each_chunk(&mut transposed, (TASK_ROWS * m).max(1), |task, out| {
        dispatch(isa, Columns { x, w, first: rows.start + task * TASK_ROWS, k, out });
    });
    for (i, row) in out.chunks_exact_mut(n).enumerate() {
        row.iter_mut().enumerate().for_each(|(j, v)| *v = transposed[j * m + i]);
    }
}

/// The GEMM of all of `x` with some rows of `w`, from row `first` on.
struct Columns<'a> {
    x: &'a [f32],
    w: Weights<'a>,
    first: usize,
    k: usize,
    out: &'a mut [f32],
}

impl Kernel for Columns<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        let Self { x, w, first, k, out } = self;
        let (m, block) = (x.len() / k, w.block(k));
        let (mut values, mut scales) = (vec![0.0; k], vec![0.0; k.div_ceil(block)]);
        for (j, out) in out.chunks_exact_mut(m.max(1)).enumerate() {
            w.row(first + j, k, &mut values, &mut scales);
            for (i, out) in out.iter_mut().enumerate() {
                let row = &x[i * k..][..k];
                let mut sum = 0.0;
                for (b, scale) in scales.iter().enumerate() {
                    let part = b * block..(b * block + block).min(k);
                    sum += dot(s, &row[part.clone()], &values[part]) * scale;
                }
                *out = sum;
            }
        }
    }
}

/// `Σ a b` in f32, 32 partial sums; both of the same length, a multiple of 32.
#[inline(always)]
pub(super) fn dot<S: Lanes>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [s.splat(0.0); 2];
    for (a, b) in a.as_chunks::<32>().0.iter().zip(b.as_chunks::<32>().0) {
        let (a, b) = (a.as_chunks::<16>().0, b.as_chunks::<16>().0);
        sums[0] = s.fma(s.load(&a[0]), s.load(&b[0]), sums[0]);
        sums[1] = s.fma(s.load(&a[1]), s.load(&b[1]), sums[1]);
    }
    s.sum(s.add(sums[0], sums[1]))
}
