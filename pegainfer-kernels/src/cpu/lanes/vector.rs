//! The operations of a path, and kernels that run on every path.

use half::bf16;

/// Work that is written once for all paths. `run` and everything it calls must be `#[inline(always)]`, so that it
/// becomes part of the `#[target_feature]` function of the path; a call is compiled without the path's instructions.
/// Closures passed to other threads must dispatch inside.
pub(crate) trait Kernel {
    /// Return type of the kernel.
    type Out;
    /// Runs the kernel on a vector type.
    fn run<S: Lanes>(self, s: S) -> Self::Out;
}

/// Operations on sixteen f32 lanes. Methods are `#[inline(always)]`, see [`Kernel`].
pub(crate) trait Lanes: Copy + Send + Sync {
    /// Sixteen f32 values.
    type V: Copy;

    /// Number of `V` that the registers of the path hold.
    const REGISTERS: usize;

    /// `x` in all lanes.
    fn splat(self, x: f32) -> Self::V;
    /// Starts loading the cache line of `from`; changes nothing else.
    fn prefetch<T>(self, from: &T);
    /// Reads sixteen values.
    fn load(self, from: &[f32; 16]) -> Self::V;
    /// Reads sixteen bf16 values; widening is exact.
    fn widen(self, from: &[bf16; 16]) -> Self::V;
    /// Reads sixteen e4m3 codes, exactly; 0x7f and 0xff, which are NaN, give 480.
    fn widen_e4m3(self, from: &[u8; 16]) -> Self::V;
    /// Writes sixteen values.
    fn store(self, v: Self::V, to: &mut [f32; 16]);
    /// Writes sixteen values rounded to bf16, to nearest even; NaN stays NaN.
    fn narrow(self, v: Self::V, to: &mut [bf16; 16]);
    /// The f32 values that [`narrow`](Self::narrow) would write.
    fn round(self, v: Self::V) -> Self::V;
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, fused if the path has FMA.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger of both; `b` if either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The largest lane; unspecified if a lane is NaN.
    fn largest(self, v: Self::V) -> f32;
    /// The first `n <= 16` lanes of `v`, then `fill`.
    fn first(self, v: Self::V, n: usize, fill: f32) -> Self::V;
    /// Adds the low bits of `t` to the exponent of `p`: `p * 2^n` for `t = n + 1.5 * 2^23`.
    fn scale_exponent(self, p: Self::V, t: Self::V) -> Self::V;
    /// `yes` in lanes with `x < limit`, otherwise `no`, also for NaN.
    fn where_below(self, x: Self::V, limit: f32, yes: Self::V, no: Self::V) -> Self::V;
    /// The sum of the lanes, added in halves: lane `i` and `i + 8`, then `i + 4`, `i + 2`, `i + 1`, on every path.
    fn sum(self, v: Self::V) -> f32;
}
