//! The operations of an instruction set on a tile of sixteen rows of w.

use super::panel::ROWS;

/// Maximum of [`Tile::TILES`].
pub(super) const MAX_TILES: usize = 2;

/// `[value of 0, value of 1, ...]`: an array of vectors without a closure, which would be compiled without the path's
/// instructions (see [`Kernel`]).
macro_rules! vectors {
    ($t:ident, $i:ident => $value:expr) => {{
        let mut all = [$t.splat(0); _];
        for ($i, v) in all.iter_mut().enumerate() {
            *v = $value;
        }
        all
    }};
}
pub(super) use vectors;

/// Work that is written once for all instruction sets. `run` and everything it calls must be `#[inline(always)]`, so
/// that it becomes part of the `#[target_feature]` function of the path.
pub(super) trait Kernel {
    /// Runs the kernel on an instruction set.
    fn run<T: Tile>(self, t: T);
}

/// Sixteen lanes, one per row of a tile, of 4 bytes each: bytes of codes, int32 sums, or f32. A value of the type
/// proves that the CPU has the instructions. Methods are `#[inline(always)]`, see [`Kernel`].
pub(super) trait Tile: Copy + Send + Sync {
    /// Sixteen lanes of bytes or int32.
    type I: Copy;
    /// Sixteen lanes of f32.
    type F: Copy;

    /// Tiles of w that are multiplied at the same time, 1 or 2.
    const TILES: usize;
    /// Maximum number of rows of x that are multiplied at the same time, with a scale for 32 columns, and with one for
    /// 16 columns: their sums fit in registers.
    const MAX_ROWS: [usize; 2];
    /// True if [`dot`](Self::dot) is faster for products that fit in int16.
    const INT16: bool;

    /// Starts loading the cache line of `at`; changes nothing else.
    #[inline(always)]
    fn prefetch(self, _at: *const u8) {}
    /// Reads 16 bytes of each row: vector `i` of the result has bytes `4 i` to `4 i + 3` of each row in its lane.
    ///
    /// # Safety
    /// 16 bytes at each of `at + r * stride` are readable, for `r` in 0..16.
    unsafe fn columns(self, at: *const u8, stride: usize) -> [Self::I; 4];
    /// Reads a vector.
    fn load(self, from: &[u32; ROWS]) -> Self::I;
    /// Writes a vector.
    fn store(self, v: Self::I, to: &mut [u32; ROWS]);
    /// `x` in all lanes.
    fn splat(self, x: u32) -> Self::I;
    /// `a & b`.
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    /// `a | b`.
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// `a ^ b`.
    fn xor(self, a: Self::I, b: Self::I) -> Self::I;
    /// Lanes shifted left by `N` bits.
    fn shl<const N: u32>(self, v: Self::I) -> Self::I;
    /// Lanes shifted right by `N` bits, zeros from the left.
    fn shr<const N: u32>(self, v: Self::I) -> Self::I;
    /// Each byte, 0 to 15, replaced by its entry of `table`.
    fn lookup(self, v: Self::I, table: [u8; 16]) -> Self::I;
    /// Byte `b` of each lane is 16 if bit `4 i + b` of the lane of `v` is set, otherwise 0; `i` in 0..8.
    fn fifth_bits(self, v: Self::I, i: usize) -> Self::I;
    /// Begins a sum of up to `QUADS` [`dot`](Self::dot)s onto the int32 `acc`. `QUADS` products fit in int16; 0 if one
    /// may not.
    #[inline(always)]
    fn begin<const QUADS: usize>(self, acc: Self::I) -> Self::I {
        acc
    }
    /// `sum` plus the products of each lane's four unsigned bytes of `w` and four signed bytes of `x`.
    fn dot<const QUADS: usize>(self, sum: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// The int32 `acc` plus the products of `sum`, which was begun from it.
    #[inline(always)]
    fn end<const QUADS: usize>(self, _acc: Self::I, sum: Self::I) -> Self::I {
        sum
    }

    /// int32 lanes as f32.
    fn to_f32(self, v: Self::I) -> Self::F;
    /// The f32 of the bits.
    fn bits_to_f32(self, v: Self::I) -> Self::F;
    /// The f16 in the lower half of each lane, as f32.
    fn f16_to_f32(self, v: Self::I) -> Self::F;
    /// `x` in all lanes.
    fn splat_f32(self, x: f32) -> Self::F;
    /// Reads a vector.
    fn load_f32(self, from: &[f32; ROWS]) -> Self::F;
    /// Writes a vector.
    fn store_f32(self, v: Self::F, to: &mut [f32; ROWS]);
    /// `a * b`.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`.
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `c - a * b`, rounded once.
    fn fnma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
}
