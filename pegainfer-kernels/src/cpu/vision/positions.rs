//! Reference kernels of `ops::vision::add_positions` and `ops::vision::rotate_grid`.

use super::values::Value;
use half::bf16;
use pegainfer_core::team;

/// Rows per task.
const ROWS: usize = 16;

/// Reference kernel of `ops::vision::add_positions`: `x[i] += Σ_t weights[i][t] table[rows[i][t]]`, with checked rows.
pub fn add_positions<T: Value>(table: &[bf16], (rows, weights): (&[[u32; 4]], &[[f32; 4]]), x: &mut [T]) {
    let hidden = x.len() / rows.len().max(1);
    team::for_each_chunk(x, (ROWS * hidden).max(1), |i, x| {
        let corners = rows[i * ROWS..].iter().zip(&weights[i * ROWS..]);
        for (x, (rows, weights)) in x.chunks_exact_mut(hidden).zip(corners) {
            let corners = rows.map(|row| &table[row as usize * hidden..][..hidden]);
            for (j, x) in x.iter_mut().enumerate() {
                let sum: f32 = corners.iter().zip(weights).map(|(corner, weight)| weight * corner[j].to_f32()).sum();
                *x = T::narrow(x.widen() + sum);
            }
        }
    });
}

/// Reference kernel of `ops::vision::rotate_grid`: rotates the first two thirds of each row of `qkv`, which are heads
/// of `head_dim` values. `table`: cosines and sines, `[positions, head_dim / 2]`; `positions`: row and column of each
/// patch, checked.
pub fn rotate_grid<T: Value>(table: &[f32], positions: &[[u32; 2]], head_dim: usize, qkv: &mut [T]) {
    let (width, half, quarter) = (qkv.len() / positions.len().max(1), head_dim / 2, head_dim / 4);
    team::for_each_chunk(qkv, (ROWS * width).max(1), |i, qkv| {
        for (row, position) in qkv.chunks_exact_mut(width).zip(&positions[i * ROWS..]) {
            let angles = position.map(|p| &table[p as usize * half..][..half]);
            for head in row[..width / 3 * 2].chunks_exact_mut(head_dim) {
                let (low, high) = head.split_at_mut(half);
                for (j, (a, b)) in low.iter_mut().zip(high).enumerate() {
                    let (axis, pair) = (angles[j / quarter], j % quarter);
                    let ((x, y), (cos, sin)) = ((a.widen(), b.widen()), (axis[pair], axis[quarter + pair]));
                    *a = T::narrow(x * cos - y * sin);
                    *b = T::narrow(y * cos + x * sin);
                }
            }
        }
    });
}
