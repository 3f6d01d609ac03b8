//! Reference kernel of `ops::deepseek_v4::rope`.

/// Rotates the last `2 * frequencies.len()` values of `row` by the angles of `position`, or back.
///
/// Pairs are neighbours: `(a, b) -> (a cos - b sin, a sin + b cos)`. The angle is an f32 product, as in the reference;
/// its sine and cosine are taken in f64, because at positions near a million an f32 reduction would be visible.
pub fn rotate(row: &mut [f32], position: u32, frequencies: &[f32], inverse: bool) {
    let first = row.len() - 2 * frequencies.len();
    for (pair, frequency) in row[first..].chunks_exact_mut(2).zip(frequencies) {
        let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
        let (sin, cos) = (if inverse { -sin } else { sin } as f32, cos as f32);
        (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos);
    }
}
