//! [`Tile`] in plain Rust, for any target.

use super::panel::ROWS;
use super::vector::Tile;
use half::f16;

/// Arrays of sixteen lanes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Portable;

/// A lane from each lane.
#[inline(always)]
fn each<A: Copy, B>(a: [A; ROWS], f: impl Fn(A) -> B) -> [B; ROWS] {
    a.map(f)
}

/// A lane from each pair of lanes.
#[inline(always)]
fn pairs<A: Copy, B>(a: [A; ROWS], b: [A; ROWS], f: impl Fn(A, A) -> B) -> [B; ROWS] {
    std::array::from_fn(|r| f(a[r], b[r]))
}

impl Tile for Portable {
    type I = [u32; ROWS];
    type F = [f32; ROWS];
    // As AVX-512, so that tests elsewhere cover two tiles.
    const TILES: usize = 2;
    const MAX_ROWS: [usize; 2] = [1, 1];
    const INT16: bool = false;

    #[inline(always)]
    unsafe fn columns(self, at: *const u8, stride: usize) -> [[u32; ROWS]; 4] {
        // SAFETY: by the caller's promise; bytes have no alignment.
        let bytes = |row: usize, i: usize| unsafe { at.add(row * stride + 4 * i).cast::<[u8; 4]>().read() };
        std::array::from_fn(|i| std::array::from_fn(|row| u32::from_le_bytes(bytes(row, i))))
    }
    #[inline(always)]
    fn load(self, from: &[u32; ROWS]) -> [u32; ROWS] {
        *from
    }
    #[inline(always)]
    fn store(self, v: [u32; ROWS], to: &mut [u32; ROWS]) {
        *to = v;
    }
    #[inline(always)]
    fn splat(self, x: u32) -> [u32; ROWS] {
        [x; ROWS]
    }
    #[inline(always)]
    fn and(self, a: [u32; ROWS], b: [u32; ROWS]) -> [u32; ROWS] {
        pairs(a, b, |a, b| a & b)
    }
    #[inline(always)]
    fn or(self, a: [u32; ROWS], b: [u32; ROWS]) -> [u32; ROWS] {
        pairs(a, b, |a, b| a | b)
    }
    #[inline(always)]
    fn xor(self, a: [u32; ROWS], b: [u32; ROWS]) -> [u32; ROWS] {
        pairs(a, b, |a, b| a ^ b)
    }
    #[inline(always)]
    fn shl<const N: u32>(self, v: [u32; ROWS]) -> [u32; ROWS] {
        each(v, |v| v << N)
    }
    #[inline(always)]
    fn shr<const N: u32>(self, v: [u32; ROWS]) -> [u32; ROWS] {
        each(v, |v| v >> N)
    }
    #[inline(always)]
    fn lookup(self, v: [u32; ROWS], table: [u8; 16]) -> [u32; ROWS] {
        each(v, |v| u32::from_le_bytes(v.to_le_bytes().map(|i| table[usize::from(i)])))
    }
    #[inline(always)]
    fn fifth_bits(self, v: [u32; ROWS], i: usize) -> [u32; ROWS] {
        each(v, |v| (0..4).fold(0, |bytes, b| bytes | (v >> (4 * i + b) & 1) << (8 * b + 4)))
    }
    #[inline(always)]
    fn dot<const QUADS: usize>(self, sum: [u32; ROWS], w: [u32; ROWS], x: [u32; ROWS]) -> [u32; ROWS] {
        std::array::from_fn(|r| {
            let pairs = w[r].to_le_bytes().into_iter().zip(x[r].to_le_bytes());
            let products = pairs.map(|(w, x)| i32::from(w) * i32::from(x.cast_signed()));
            sum[r].wrapping_add(products.sum::<i32>().cast_unsigned())
        })
    }
    #[inline(always)]
    fn to_f32(self, v: [u32; ROWS]) -> [f32; ROWS] {
        each(v, |v| v.cast_signed() as f32)
    }
    #[inline(always)]
    fn bits_to_f32(self, v: [u32; ROWS]) -> [f32; ROWS] {
        each(v, f32::from_bits)
    }
    #[inline(always)]
    fn f16_to_f32(self, v: [u32; ROWS]) -> [f32; ROWS] {
        each(v, |v| f16::from_bits((v & 0xffff) as u16).to_f32())
    }
    #[inline(always)]
    fn splat_f32(self, x: f32) -> [f32; ROWS] {
        [x; ROWS]
    }
    #[inline(always)]
    fn load_f32(self, from: &[f32; ROWS]) -> [f32; ROWS] {
        *from
    }
    #[inline(always)]
    fn store_f32(self, v: [f32; ROWS], to: &mut [f32; ROWS]) {
        *to = v;
    }
    #[inline(always)]
    fn mul(self, a: [f32; ROWS], b: [f32; ROWS]) -> [f32; ROWS] {
        pairs(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn sub(self, a: [f32; ROWS], b: [f32; ROWS]) -> [f32; ROWS] {
        pairs(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn fma(self, a: [f32; ROWS], b: [f32; ROWS], c: [f32; ROWS]) -> [f32; ROWS] {
        std::array::from_fn(|r| a[r].mul_add(b[r], c[r]))
    }
    #[inline(always)]
    fn fnma(self, a: [f32; ROWS], b: [f32; ROWS], c: [f32; ROWS]) -> [f32; ROWS] {
        std::array::from_fn(|r| (-a[r]).mul_add(b[r], c[r]))
    }
}
