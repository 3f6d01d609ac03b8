//! `out = x * w^T` for bf16 activations and bf16, FP8 or group-quantised weights: the GEMM that takes most of the time
//! of a transformer on the CPU.
//!
//! One file per instruction-set path; [`grid`] splits the work into tasks, [`output`] stores results. Weights are read
//! in the checkpoint's layout, `[n, k]` row-major, without a second copy or repacking. Each path fixes one order of
//! summation over `k` for every tile shape. The bits of an output therefore depend only on its x row, its w row and
//! `k`, not on the batch, the tile or the number of threads.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod grid;
mod int8;
mod output;
mod portable;
mod problem;
#[cfg(test)]
mod tests;

use super::isa::Isa;
use super::weights::Weights;
use half::bf16;
pub use output::LinearOut;
pub use pegainfer_core::exec::Activations;
pub use pegainfer_core::scratch::Scratch;
use problem::{Fp8, Problem};

/// GEMM with transposed weights: `out[i, j] = sum over l of x[i, l] * w[j, l]`.
///
/// `x`: `[m, k]` bf16; `w`: `[n, k]` bf16, the checkpoint's layout; `out`: `[m, n]` bf16 or f32; all row-major.
/// Products and sums are f32, in the path's order of summation (see its file); a bf16 output is rounded once, to
/// nearest even. The bits of row `i` of `out` do not depend on `m`, the other rows or the thread count. [`Isa::Amx`]
/// flushes denormals, the other paths do not.
///
/// Runs on the current [`team`](pegainfer_core::team). `scratch` may be shared by all calls of one thread.
///
/// # Panics
/// If the size of a slice does not match `m`, `n` and `k`, or if this machine lacks `isa`.
#[expect(clippy::too_many_arguments, reason = "a BLAS-like signature: three matrices and three dimensions")]
pub fn linear(
    isa: Isa,
    x: &[bf16],
    w: &[bf16],
    m: usize,
    n: usize,
    k: usize,
    mut out: LinearOut<'_>,
    scratch: &mut Scratch,
) {
    assert_eq!(x.len(), m * k, "x is [m, k] = [{m}, {k}]");
    assert_eq!(w.len(), n * k, "w is [n, k] = [{n}, {k}]");
    assert_eq!(out.len(), m * n, "out is [m, n] = [{m}, {n}]");
    assert!(isa.is_available(), "this machine cannot run the {isa} path");
    run_bf16(isa, &Problem { x, w, m, n, k, sink: out.sink(), stride: n }, scratch);
}

/// Variant of [`linear`] for bf16, FP8 or group-quantised weights: the rows of all `parts`, one after the other. `k` is
/// at least 1.
///
/// Group-quantised weights are multiplied as [`Activations`] says: exact activations by the portable path, int8 by
/// [`int8`], which gives the same bits on every path. FP8 codes and groups of 16 columns with offsets, which [`int8`]
/// does not have, take the exact way.
///
/// # Panics
/// See [`linear`]; also if a part is FP4.
pub fn linear_stacked(
    (isa, activations): (Isa, Activations),
    x: &[bf16],
    parts: &[Weights<'_>],
    (m, k): (usize, usize),
    mut out: LinearOut<'_>,
    scratch: &mut Scratch,
) {
    let stride = parts.iter().map(|part| part.rows(k)).sum();
    assert_eq!(x.len(), m * k, "x is [m, k] = [{m}, {k}]");
    assert_eq!(out.len(), m * stride, "out is [m, n] = [{m}, {stride}]");
    assert!(isa.is_available(), "this machine cannot run the {isa} path");
    let mut first = 0;
    for part in parts {
        let (n, sink) = (part.rows(k), out.sink().at_column(first));
        match *part {
            Weights::Bf16(w) => run_bf16(isa, &Problem { x, w, m, n, k, sink, stride }, scratch),
            Weights::Fp8(codes, scales) => {
                assert_eq!(codes.len(), n * k, "codes are [n, k] = [{n}, {k}]");
                run_fp8(isa, &Problem { x, w: Fp8 { codes, scales }, m, n, k, sink, stride }, scratch);
            }
            Weights::Grouped(w) if activations != Activations::Exact && int8::supports(w.format) => {
                int8::run(isa, &Problem { x, w, m, n, k, sink, stride }, scratch);
            }
            Weights::Grouped(w) => portable::run_grouped(&Problem { x, w, m, n, k, sink, stride }),
            Weights::Fp4(..) => panic!("FP4 weights are for ops::deepseek_v4"),
        }
        first += n;
    }
}

#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "the portable path needs no scratch"))]
fn run_bf16(isa: Isa, problem: &Problem<'_>, scratch: &mut Scratch) {
    if problem.m == 0 || problem.n == 0 {
        return;
    }
    match isa {
        Isa::Portable | Isa::Neon => portable::run(problem),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::run(problem, scratch),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => avx512::run(problem, scratch),
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => amx::run(problem, scratch),
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("{isa} is never available here"),
    }
}

#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "the portable path needs no scratch"))]
fn run_fp8(isa: Isa, problem: &Problem<'_, Fp8<'_>>, scratch: &mut Scratch) {
    if problem.m == 0 || problem.n == 0 {
        return;
    }
    match isa {
        Isa::Portable | Isa::Neon => portable::run_fp8(problem),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::run_fp8(problem, scratch),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => avx512::run_fp8(problem, scratch),
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => amx::run_fp8(problem, scratch),
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("{isa} is never available here"),
    }
}
