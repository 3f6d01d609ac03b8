//! Sixteen f32 lanes on each instruction set: the vector type of all CPU kernels except GEMMs.
//!
//! A kernel is a type with a generic [`Kernel::run`]; [`dispatch`] runs it compiled for the path of an [`Isa`]. A value
//! of a [`Lanes`] type proves that the CPU has the path's instructions, so code generic over `Lanes` is safe.
//! Operations are lane-wise IEEE f32: a path rounds a lane in the same way for any neighbours.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
#[cfg(test)]
mod tests;
mod vector;

use half::bf16;

use super::isa::Isa;
pub(crate) use portable::Portable;
pub(crate) use vector::{Kernel, Lanes};

/// Runs `kernel` on the path of `isa`; AMX uses AVX-512 for everything but GEMMs. Costs a few nanoseconds.
///
/// # Panics
/// If the CPU lacks `isa`.
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Out {
    match isa {
        Isa::Portable | Isa::Neon => return kernel.run(Portable),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            if let Some(path) = avx2::Avx2::detect() {
                return path.run(kernel);
            }
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => {
            if let Some(path) = avx512::Avx512::detect() {
                return path.run(kernel);
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        _ => {}
    }
    panic!("this machine cannot run the {isa} path")
}

/// `2^x` for `x <= 127`; exactly 1 at 0, exactly 0 below -125 (including -inf), NaN at NaN. The relative error is below
/// 1.5e-7; tests check it against f64.
#[inline(always)]
pub(crate) fn exp2<S: Lanes>(s: S, x: S::V) -> S::V {
    let (t, f) = split(s, x);
    exp2_of(s, x, t, f)
}

/// `2^(x + low)`, like [`exp2`], for a correction `low` that is small compared with 1, if rounding the sum would lose
/// too much.
#[inline(always)]
pub(crate) fn exp2_sum<S: Lanes>(s: S, x: S::V, low: S::V) -> S::V {
    let (t, f) = split(s, x);
    exp2_of(s, x, t, s.add(f, low))
}

/// `x = n + f` with `|f| <= 1/2`: `n` in the low bits of the mantissa of the first, and `f`.
#[inline(always)]
fn split<S: Lanes>(s: S, x: S::V) -> (S::V, S::V) {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves round(x) in the low bits
    let t = s.add(x, s.splat(ROUND));
    (t, s.sub(x, s.sub(t, s.splat(ROUND))))
}

/// A minimax polynomial for `2^f`, `|f| <= 1/2`, highest degree first: relative error 2.6e-9 before rounding, found
/// with the Remez exchange under the constraint `p(0) = 1`.
pub(crate) const EXP2: [f32; 7] =
    [1.559_467_7e-4, 1.340_664_4e-3, 9.617_693e-3, 5.550_310_6e-2, 2.402_265_3e-1, 6.931_472e-1, 1.0];

/// `2^(n + f)`, and 0 for `x < -125`.
#[inline(always)]
fn exp2_of<S: Lanes>(s: S, x: S::V, t: S::V, f: S::V) -> S::V {
    let mut p = s.splat(EXP2[0]);
    for c in &EXP2[1..] {
        p = s.fma(p, f, s.splat(*c));
    }
    s.where_below(x, -125.0, s.splat(0.0), s.scale_exponent(p, t))
}

/// The up to sixteen values left over by a loop over whole vectors, padded with zeros.
#[inline(always)]
pub(crate) fn padded<T: Copy + Default>(tail: &[T]) -> [T; 16] {
    let mut lanes = [T::default(); 16];
    lanes[..tail.len()].copy_from_slice(tail);
    lanes
}

/// The first `N` elements.
///
/// # Panics
/// If there are fewer.
#[inline(always)]
pub(crate) fn chunk<T, const N: usize>(from: &[T]) -> &[T; N] {
    match from.first_chunk() {
        Some(chunk) => chunk,
        None => panic!("{} elements, but a kernel reads {N}", from.len()),
    }
}

/// Mutable variant of [`chunk`].
#[inline(always)]
pub(crate) fn chunk_mut<T, const N: usize>(to: &mut [T]) -> &mut [T; N] {
    let len = to.len();
    match to.first_chunk_mut() {
        Some(chunk) => chunk,
        None => panic!("{len} elements, but a kernel writes {N}"),
    }
}

/// A function of two values, lane by lane.
pub(crate) trait Binary: Copy {
    /// `f(a, b)`; `#[inline(always)]`, see [`Kernel`].
    fn apply<S: Lanes>(self, s: S, a: S::V, b: S::V) -> S::V;
}

/// `out[i] = bf16(f(a[i], b[i]))`, slices of one length, any length.
#[inline(always)]
pub(crate) fn zip<S: Lanes>(s: S, f: impl Binary, a: &[bf16], b: &[bf16], out: &mut [bf16]) {
    assert!(a.len() == out.len() && b.len() == out.len());
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks(), b.as_chunks());
    let (out, out_tail) = out.as_chunks_mut();
    for ((a, b), out) in a.iter().zip(b).zip(out) {
        s.narrow(f.apply(s, s.widen(a), s.widen(b)), out);
    }
    if !out_tail.is_empty() {
        let mut last = [bf16::ZERO; 16];
        s.narrow(f.apply(s, s.widen(&padded(a_tail)), s.widen(&padded(b_tail))), &mut last);
        out_tail.copy_from_slice(&last[..out_tail.len()]);
    }
}
