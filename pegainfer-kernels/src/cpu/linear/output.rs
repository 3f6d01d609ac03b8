//! Output of a GEMM: a `[m, n]` buffer that parallel tasks fill in disjoint parts.

use half::bf16;

/// The output buffer, `[m, n]` row-major.
pub enum LinearOut<'a> {
    /// Each f32 sum is rounded once, to nearest even.
    Bf16(&'a mut [bf16]),
    /// The f32 sums as they are.
    F32(&'a mut [f32]),
}

impl LinearOut<'_> {
    /// Number of elements.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Bf16(out) => out.len(),
            Self::F32(out) => out.len(),
        }
    }

    /// A copyable handle for tasks. It must not outlive the borrow, which [`super::linear`] holds until all tasks end.
    pub(super) fn sink(&mut self) -> Sink {
        match self {
            Self::Bf16(out) => Sink::Bf16(out.as_mut_ptr()),
            Self::F32(out) => Sink::F32(out.as_mut_ptr()),
        }
    }
}

/// The output as tasks see it. Columns of a row-major matrix cannot be split into `&mut` slices, hence the pointers.
#[derive(Clone, Copy)]
pub(super) enum Sink {
    Bf16(*mut bf16),
    F32(*mut f32),
}

// SAFETY: tasks write disjoint elements (each output belongs to one task of the grid), and nothing is read before they
// end.
unsafe impl Send for Sink {}
// SAFETY: as above.
unsafe impl Sync for Sink {}

impl Sink {
    /// The output from column `first` on.
    pub(super) fn at_column(self, first: usize) -> Self {
        match self {
            Self::Bf16(out) => Self::Bf16(out.wrapping_add(first)),
            Self::F32(out) => Self::F32(out.wrapping_add(first)),
        }
    }

    /// Stores `values` from element `index` on.
    ///
    /// # Safety
    /// The elements lie inside the output and belong to the calling task.
    #[inline(always)]
    pub(super) unsafe fn put(self, index: usize, values: &[f32]) {
        // SAFETY: in bounds and unshared, by the caller's promise.
        unsafe {
            match self {
                Self::Bf16(out) => {
                    for (i, &value) in values.iter().enumerate() {
                        out.add(index + i).write(bf16::from_f32(value));
                    }
                }
                Self::F32(out) => out.add(index).copy_from_nonoverlapping(values.as_ptr(), values.len()),
            }
        }
    }

    /// Stores the first `count` (1 to 4) lanes from element `index` on.
    ///
    /// # Safety
    /// See [`Sink::put`]; the CPU has SSE4.1.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "sse4.1")]
    #[inline]
    pub(super) unsafe fn put4(self, index: usize, values: std::arch::x86_64::__m128, count: usize) {
        use std::arch::x86_64::*;
        // SAFETY: in bounds and unshared, by the caller's promise; unaligned stores of exactly 4 elements.
        unsafe {
            match self {
                Self::F32(out) if count == 4 => _mm_storeu_ps(out.add(index), values),
                Self::Bf16(out) if count == 4 => {
                    let bits = _mm_castps_si128(values);
                    let odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
                    let rounded = _mm_add_epi32(_mm_add_epi32(bits, _mm_set1_epi32(0x7fff)), odd);
                    // A NaN stays one: quiet it instead of letting the carry reach the exponent.
                    let quiet = _mm_or_si128(bits, _mm_set1_epi32(0x40_0000));
                    let nan = _mm_castps_si128(_mm_cmpunord_ps(values, values));
                    let high = _mm_srli_epi32(_mm_blendv_epi8(rounded, quiet, nan), 16);
                    _mm_storel_epi64(out.add(index).cast(), _mm_packus_epi32(high, high));
                }
                _ => {
                    let mut lanes = [0.0f32; 4];
                    _mm_storeu_ps(lanes.as_mut_ptr(), values);
                    self.put(index, &lanes[..count]);
                }
            }
        }
    }

    /// Stores the first `count` (up to 16) lanes from element `index` on.
    ///
    /// # Safety
    /// See [`Sink::put`]; the CPU has AVX-512 F, BW and VL.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    pub(super) unsafe fn put16(self, index: usize, values: std::arch::x86_64::__m512, count: usize) {
        use std::arch::x86_64::*;
        let mask = ((1u32 << count) - 1) as __mmask16;
        // SAFETY: the mask keeps the stores in bounds and unshared, by the caller's promise.
        unsafe {
            match self {
                Self::F32(out) => _mm512_mask_storeu_ps(out.wrapping_add(index), mask, values),
                Self::Bf16(out) => {
                    let bits = _mm512_castps_si512(values);
                    let odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
                    let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
                    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
                    let quiet = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x40_0000));
                    let high = _mm512_cvtepi32_epi16(_mm512_srli_epi32(quiet, 16));
                    _mm256_mask_storeu_epi16(out.wrapping_add(index).cast(), mask, high);
                }
            }
        }
    }
}
