//! Sixteen f32 lanes, the one vector type of the attention kernel, on each instruction set.
//!
//! A value of a [`Lanes`] type is proof that the CPU has the path's instructions, so code that is generic over `Lanes`
//! is safe. Operations are lane-wise IEEE f32: a path always rounds a lane in the same way, whatever its neighbours.

use half::bf16;

use super::kernel::{Tile, run_item, run_tile};
use super::state::{Call, Item, Scratch};

/// Operations on sixteen f32 lanes. Methods are `#[inline(always)]` so that they land in the `#[target_feature]`
/// function of [`Lanes::item`].
pub(crate) trait Lanes: Copy + Send + Sync {
    /// Sixteen f32 values.
    type V: Copy;

    /// Query lines of the largest register tile; a multiple of every smaller tile is not needed.
    const LINES: usize;

    /// Runs one work item compiled for this path.
    fn item(self, call: &Call<'_>, item: &Item<'_>, scratch: &mut Scratch);

    /// Runs one register tile of `tile.lines <= LINES` lines, in the smallest instantiation that holds them.
    fn tile(self, call: &Call<'_>, tile: &Tile<'_>, scratch: &mut Scratch);

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// Starts loading the cache line of `from`; changes nothing else.
    fn prefetch(self, from: &[bf16; 16]);
    /// Reads sixteen values.
    fn load(self, from: &[f32; 16]) -> Self::V;
    /// Reads sixteen bf16 values; widening is exact.
    fn widen(self, from: &[bf16; 16]) -> Self::V;
    /// Writes sixteen values.
    fn store(self, v: Self::V, to: &mut [f32; 16]);
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, fused where the path has FMA.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger one; `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The largest lane; unspecified if a lane is NaN.
    fn largest(self, v: Self::V) -> f32;
    /// The first `n <= 16` lanes of `v`, then `fill`.
    fn first(self, v: Self::V, n: usize, fill: f32) -> Self::V;
    /// Adds the low bits of `t` to the exponent of `p`: `p * 2^n` for `t = n + 1.5 * 2^23`.
    fn scale_exponent(self, p: Self::V, t: Self::V) -> Self::V;
    /// `v`, but 0 in the lanes where `x < limit`.
    fn zero_where_below(self, v: Self::V, x: Self::V, limit: f32) -> Self::V;
}

/// `2^x` for `x <= 127`; exactly 1 at 0, exactly 0 below -125 (so at -inf), NaN at NaN.
///
/// `x = n + f` with `|f| <= 1/2`, and a degree-6 minimax polynomial for `2^f` (relative error 2.6e-9 before rounding,
/// found with the Remez exchange under the constraint `p(0) = 1`). With f32 rounding the relative error is below
/// 1.5e-7, which the tests check against f64.
#[inline(always)]
pub(crate) fn exp2<S: Lanes>(s: S, x: S::V) -> S::V {
    // Adding 1.5 * 2^23 leaves round(x) in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    const POLY: [f32; 7] =
        [1.559_467_7e-4, 1.340_664_4e-3, 9.617_693e-3, 5.550_310_6e-2, 2.402_265_3e-1, 6.931_472e-1, 1.0];
    let t = s.add(x, s.splat(ROUND));
    let f = s.sub(x, s.sub(t, s.splat(ROUND)));
    let mut p = s.splat(POLY[0]);
    for c in &POLY[1..] {
        p = s.fma(p, f, s.splat(*c));
    }
    s.zero_where_below(s.scale_exponent(p, t), x, -125.0)
}

/// Plain Rust, any target. Fused multiply-add only where it is an instruction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> [f32; 16] {
    std::array::from_fn(f)
}

impl Lanes for Portable {
    type V = [f32; 16];
    const LINES: usize = 2;

    fn item(self, call: &Call<'_>, item: &Item<'_>, scratch: &mut Scratch) {
        run_item(self, call, item, scratch);
    }
    fn tile(self, call: &Call<'_>, tile: &Tile<'_>, scratch: &mut Scratch) {
        match tile.lines {
            0 | 1 => run_tile::<Self, 1, 1>(self, call, tile, scratch),
            _ => run_tile::<Self, 2, 1>(self, call, tile, scratch),
        }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> [f32; 16] {
        [x; 16]
    }
    #[inline(always)]
    fn prefetch(self, _from: &[bf16; 16]) {}
    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> [f32; 16] {
        *from
    }
    #[inline(always)]
    fn widen(self, from: &[bf16; 16]) -> [f32; 16] {
        each(|i| f32::from_bits(u32::from(from[i].to_bits()) << 16))
    }
    #[inline(always)]
    fn store(self, v: [f32; 16], to: &mut [f32; 16]) {
        *to = v;
    }
    #[inline(always)]
    fn add(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn fma(self, a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
            each(|i| a[i].mul_add(b[i], c[i]))
        } else {
            each(|i| a[i] * b[i] + c[i])
        }
    }
    #[inline(always)]
    fn max(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn largest(self, v: [f32; 16]) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn first(self, v: [f32; 16], n: usize, fill: f32) -> [f32; 16] {
        each(|i| if i < n { v[i] } else { fill })
    }
    #[inline(always)]
    fn scale_exponent(self, p: [f32; 16], t: [f32; 16]) -> [f32; 16] {
        each(|i| f32::from_bits(p[i].to_bits().wrapping_add(t[i].to_bits() << 23)))
    }
    #[inline(always)]
    fn zero_where_below(self, v: [f32; 16], x: [f32; 16], limit: f32) -> [f32; 16] {
        each(|i| if x[i] < limit { 0.0 } else { v[i] })
    }
}
