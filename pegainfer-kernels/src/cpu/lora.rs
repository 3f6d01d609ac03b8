//! Reference kernel of the second half of `ops::lora`. That of the first is [`linear`](super::linear).

use super::rows::per_task;
use half::bf16;
use pegainfer_core::team;

/// `out[i, c] += Σ_j x[i, s * rank + j] * b[c, j]` for each column `c` of segment `s` of the `segments`, whose columns are
/// stacked.
///
/// `x`: `[rows, segments * rank]`, `b`: `[width, rank]`, `out`: `[rows, width]`. The sum starts at 0, adds `j` in order in
/// f32, and is added to `out`, which is rounded once.
pub fn expand((x, rank): (&[f32], usize), b: &[bf16], segments: &[usize], out: &mut [bf16], width: usize) {
    let (n, rows) = (segments.len() * rank, per_task(width * rank * size_of::<f32>()));
    team::for_each_chunk(out, (rows * width).max(1), |i, out| {
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            let (mut x, mut first) = (x[(i * rows + row) * n..][..n].chunks_exact(rank), 0);
            for columns in segments {
                let Some(x) = x.next() else { return };
                let b = b[first * rank..].chunks_exact(rank);
                for (out, b) in out[first..first + columns].iter_mut().zip(b) {
                    let delta = x.iter().zip(b).fold(0.0, |sum, (x, b)| sum + x * b.to_f32());
                    *out = bf16::from_f32(out.to_f32() + delta);
                }
                first += columns;
            }
        }
    });
}
