//! CPU twin of `ops::swiglu`.

use half::bf16;
use pegainfer_core::isa::Isa;
use rayon::prelude::*;

/// See `ops::swiglu`. `gate_up`: `[rows, 2 * width]`, `out`: `[rows, width]`.
pub fn swiglu(_isa: Isa, gate_up: &[bf16], width: usize, out: &mut [bf16]) {
    out.par_chunks_mut(width).zip(gate_up.par_chunks(2 * width)).for_each(|(out, row)| {
        let (gate, up) = row.split_at(width);
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            let z = gate.to_f32();
            let silu = bf16::from_f32(z / (1.0 + (-z).exp()));
            *out = bf16::from_f32(silu.to_f32() * up.to_f32());
        }
    });
}
