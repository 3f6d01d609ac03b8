//! A 16 x 16 transposition in registers: x into tile layout, sums back into rows.

use std::arch::x86_64::*;

/// Transposes a 16 x 16 matrix of 32-bit elements.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn transpose(rows: [__m512i; 16]) -> [__m512i; 16] {
    let mut out = rows;
    // Inside 128-bit lanes: quads[4 i + j], lane b holds rows 4 i .. 4 i + 4 of column 4 b + j.
    let mut quads = rows;
    for (rows, quads) in rows.as_chunks::<4>().0.iter().zip(quads.as_chunks_mut::<4>().0) {
        let [a, b, c, d] = *rows;
        let (ab_low, cd_low) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
        let (ab_high, cd_high) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
        quads[0] = _mm512_unpacklo_epi64(ab_low, cd_low);
        quads[1] = _mm512_unpackhi_epi64(ab_low, cd_low);
        quads[2] = _mm512_unpacklo_epi64(ab_high, cd_high);
        quads[3] = _mm512_unpackhi_epi64(ab_high, cd_high);
    }
    // A 4 x 4 transposition of the lanes.
    for j in 0..4 {
        let [a, b, c, d] = [quads[j], quads[4 + j], quads[8 + j], quads[12 + j]];
        let (ab_even, cd_even) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0x88>(c, d));
        let (ab_odd, cd_odd) = (_mm512_shuffle_i32x4::<0xdd>(a, b), _mm512_shuffle_i32x4::<0xdd>(c, d));
        out[j] = _mm512_shuffle_i32x4::<0x88>(ab_even, cd_even);
        out[4 + j] = _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd);
        out[8 + j] = _mm512_shuffle_i32x4::<0xdd>(ab_even, cd_even);
        out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(ab_odd, cd_odd);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transpose_swaps_rows_and_columns() {
        if !crate::cpu::isa::Isa::Avx512.is_available() {
            return;
        }
        let cell = |row: usize, col: usize| (row * 16 + col) as u32;
        let input: [[u32; 16]; 16] = std::array::from_fn(|row| std::array::from_fn(|col| cell(row, col)));
        let mut output = [[0u32; 16]; 16];
        // SAFETY: the CPU has AVX-512 F; every row has 64 bytes.
        unsafe {
            let rows = input.each_ref().map(|row| _mm512_loadu_si512(row.as_ptr().cast()));
            for (row, out) in transpose(rows).into_iter().zip(&mut output) {
                _mm512_storeu_si512(out.as_mut_ptr().cast(), row);
            }
        }
        assert_eq!(output, std::array::from_fn(|row| std::array::from_fn(|col| cell(col, row))));
    }
}
