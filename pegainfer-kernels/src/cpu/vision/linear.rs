//! Reference kernel of `ops::vision::linear_f32`.

use crate::cpu::isa::Isa;
use crate::cpu::linear::{LinearOut, Scratch, linear};
use half::bf16;

/// Terms of a split value: 3 times 8 bits are the 24 of an f32.
const TERMS: usize = 3;

/// `out = x · wᵀ`; `x`: `[m, k]`, `w`: `[n, k]`, `out`: `[m, n]`. Each value of `x` is the exact sum of three bf16
/// values (unless it is denormal in one of them), whose products are summed by the GEMM for bf16.
pub fn linear_f32(isa: Isa, x: &[f32], w: &[bf16], (m, n, k): (usize, usize, usize), out: &mut [f32]) {
    let (mut rest, mut term) = (x.to_vec(), vec![bf16::ZERO; x.len()]);
    let (mut sums, mut scratch) = (vec![0.0; out.len()], Scratch::new());
    out.fill(0.0);
    for _ in 0..TERMS {
        for (rest, term) in rest.iter_mut().zip(&mut term) {
            *term = bf16::from_f32(*rest);
            *rest -= term.to_f32();
        }
        linear(isa, &term, w, m, n, k, LinearOut::F32(&mut sums), &mut scratch);
        out.iter_mut().zip(&sums).for_each(|(out, sum)| *out += sum);
    }
}
