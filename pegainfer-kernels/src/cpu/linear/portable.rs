//! The path that runs anywhere: sixteen f32 lanes of plain Rust that the compiler may vectorise.

use super::grid::Grid;
use super::problem::{Fp8, Problem};
use crate::cpu::weights::{BLOCK, Grouped, widen_e4m3};
use half::bf16;

const LANES: usize = 16;

/// `out = x * w^T`. Lane `l` of an output sums the products of `k = l, l + 16, ...` in that order, product and sum
/// rounded separately (an emulated FMA would be slow); the lanes are then added in halves.
pub(super) fn run(p: &Problem<'_>) {
    let k = p.k;
    Grid::new(p.m, k * 2, usize::MAX, p.n, 4).for_each(|rows, cols| {
        for col in cols {
            let w = &p.w[col * k..][..k];
            for row in rows.clone() {
                // SAFETY: row < m and col < n; the element belongs to this task's block.
                unsafe { p.sink.put(row * p.stride + col, &[dot(&p.x[row * k..][..k], w)]) };
            }
        }
    });
}

/// Variant for FP8 weights.
pub(super) fn run_fp8(p: &Problem<'_, Fp8<'_>>) {
    let k = p.k;
    Grid::new(p.m, k * 2, usize::MAX, p.n, 4).for_each(|rows, cols| {
        let mut w = vec![bf16::ZERO; k];
        for col in cols {
            widen_e4m3(&p.w.codes[col * k..][..k], &mut w);
            for row in rows.clone() {
                let blocks = p.x[row * k..][..k].chunks(BLOCK).zip(w.chunks(BLOCK)).enumerate();
                let sum = blocks.fold(0.0, |sum, (b, (x, w))| sum + dot(x, w) * p.w.scale(col, b, k));
                // SAFETY: row < m and col < n; the element belongs to this task's block.
                unsafe { p.sink.put(row * p.stride + col, &[sum]) };
            }
        }
    });
}

/// Variant for group-quantised weights: a row becomes f32 numbers, each rounded once, before it is multiplied.
pub(super) fn run_grouped(p: &Problem<'_, Grouped<'_>>) {
    let k = p.k;
    Grid::new(p.m, k * 2, usize::MAX, p.n, 4).for_each(|rows, cols| {
        let mut w = vec![0.0; k];
        for col in cols {
            p.w.dequantize_row(col, k, &mut w);
            for row in rows.clone() {
                let sum = dot_f32(&p.x[row * k..][..k], &w);
                // SAFETY: row < m and col < n; the element belongs to this task's block.
                unsafe { p.sink.put(row * p.stride + col, &[sum]) };
            }
        }
    });
}

/// The dot product with a row in f32, in the order that [`run`] documents. `k` is a multiple of the lanes.
fn dot_f32(x: &[bf16], w: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (x, w) in x.as_chunks::<LANES>().0.iter().zip(w.as_chunks::<LANES>().0) {
        for lane in 0..LANES {
            lanes[lane] += widen(x[lane]) * w[lane];
        }
    }
    sum(lanes)
}

/// The dot product of two rows in the order that [`run`] documents.
fn dot(x: &[bf16], w: &[bf16]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (x_steps, x_tail) = x.as_chunks::<LANES>();
    let (w_steps, w_tail) = w.as_chunks::<LANES>();
    for (x, w) in x_steps.iter().zip(w_steps) {
        for lane in 0..LANES {
            lanes[lane] += widen(x[lane]) * widen(w[lane]);
        }
    }
    for (lane, (x, w)) in lanes.iter_mut().zip(x_tail.iter().zip(w_tail)) {
        *lane += widen(*x) * widen(*w);
    }
    sum(lanes)
}

/// The sum of the lanes, added in halves.
fn sum(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// bf16 to f32 without the NaN test of `bf16::to_f32`, which prevents vectorisation.
fn widen(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}
