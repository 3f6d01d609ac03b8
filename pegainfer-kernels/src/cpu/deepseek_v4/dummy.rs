//! Reference kernel of `ops::deepseek_v4::{random_codes, random_numbers}`.

use pegainfer_core::{rng, team};

/// Position of a part in the whole matrix.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Columns of the whole matrix.
    pub whole: usize,
    /// First row of the part.
    pub first_row: usize,
    /// First column of the part.
    pub first_column: usize,
}

/// Fills rows of `width` elements with `value` of the random bits of each element; `each` elements share a word of 64
/// bits.
pub fn fill<T: Send>(
    out: &mut [T],
    width: usize,
    place: Place,
    seed: u64,
    each: usize,
    value: impl Fn(u64) -> T + Sync,
) {
    team::for_each_chunk(out, width.max(1), |row, out| {
        let first = (place.first_row + row) * place.whole + place.first_column;
        for (column, v) in out.iter_mut().enumerate() {
            let at = first + column;
            *v = value(rng::bits(seed, (at / each) as u64) >> (64 / each * (at % each)));
        }
    });
}
