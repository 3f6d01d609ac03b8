//! Reference kernel of `ops::deepseek_v4::{matmul, grouped_matmul}`.

use super::formats::{e2m1, e4m3, e8m0};
use crate::cpu::isa::Isa;
use crate::cpu::lanes::{Kernel, Lanes, dispatch};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// Values of a rounded activation that share a scale, and edge of an FP8 weight's block.
pub const BLOCK: usize = 128;
/// Values of a weight row that share an FP4 scale.
pub const FP4_BLOCK: usize = 32;
/// Weight rows of a task.
const TASK_ROWS: usize = 16;

/// A weight `[n, k]` as stored; see `ops::deepseek_v4::Matrix`.
#[derive(Clone, Copy)]
pub enum Weights<'a> {
    /// `[n, k]`.
    Bf16(&'a [bf16]),
    /// Codes `[n, k]`, scales `[n / 128, k / 128]`, rounded up.
    Fp8(&'a [u8], &'a [u8]),
    /// Pairs of codes `[n, k / 2]`, scales `[n, k / 32]`.
    Fp4(&'a [u8], &'a [u8]),
}

impl Weights<'_> {
    /// Values along `k` that are summed before a scale is applied.
    fn block(self, k: usize) -> usize {
        match self {
            Self::Bf16(_) => k,
            Self::Fp8(..) => BLOCK,
            Self::Fp4(..) => FP4_BLOCK,
        }
    }

    /// Row `j`: its values without scales, and the scale of each block.
    fn row(self, j: usize, k: usize, values: &mut [f32], scales: &mut [f32]) {
        match self {
            Self::Bf16(w) => {
                values.iter_mut().zip(&w[j * k..]).for_each(|(v, w)| *v = w.to_f32());
                scales.fill(1.0);
            }
            Self::Fp8(codes, bytes) => {
                values.iter_mut().zip(&codes[j * k..]).for_each(|(v, code)| *v = e4m3(*code));
                let blocks = k.div_ceil(BLOCK);
                scales.iter_mut().zip(&bytes[j / BLOCK * blocks..]).for_each(|(s, byte)| *s = e8m0(*byte));
            }
            Self::Fp4(pairs, bytes) => {
                for (two, pair) in values.chunks_exact_mut(2).zip(&pairs[j * k / 2..]) {
                    // The low nibble is the even column.
                    (two[0], two[1]) = (e2m1(pair & 15), e2m1(pair >> 4));
                }
                scales.iter_mut().zip(&bytes[j * k / FP4_BLOCK..]).for_each(|(s, byte)| *s = e8m0(*byte));
            }
        }
    }

    /// The weight as numbers, `[n, k]`: value times scale.
    pub fn dequantize(self, n: usize, k: usize) -> Vec<f32> {
        let block = self.block(k);
        let mut scales = vec![0.0; k.div_ceil(block)];
        let mut out = vec![0.0; n * k];
        for (j, row) in out.chunks_exact_mut(k).enumerate() {
            self.row(j, k, row, &mut scales);
            row.chunks_mut(block).zip(&scales).for_each(|(part, s)| part.iter_mut().for_each(|v| *v *= s));
        }
        out
    }
}

/// `out[i, j] = Σ over blocks b of (Σ over l in b of x[i, l] w[j, l]) · sw[j, b]`, f32 throughout. An output's bits depend on
/// its rows alone. `k` is a multiple of 32; `j` runs over `rows` of `w`.
pub fn matmul(isa: Isa, x: &[f32], w: Weights<'_>, rows: Range<usize>, k: usize, out: &mut [f32]) {
    let (m, n) = (x.len() / k, rows.len());
    // A task's output is columns of `out`; tasks write their own part of the transpose.
    let mut transposed = vec![0.0; m * n];
    transposed.par_chunks_mut((TASK_ROWS * m).max(1)).enumerate().for_each(|(task, out)| {
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
