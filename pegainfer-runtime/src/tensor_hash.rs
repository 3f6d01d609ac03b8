//! Hashes of tensors, to compare ranks bit for bit.

use pegainfer_core::exec::Exec;
use pegainfer_core::rng::mix;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::ops::Range;

/// Continues the hash `before` with these words.
pub(super) fn hash_words(before: u64, words: impl IntoIterator<Item = u32>) -> u64 {
    words.into_iter().fold(before, |hash, word| mix(hash ^ u64::from(word)))
}

/// Continues the hash `before` with some rows of a bf16 or f32 tensor; waits for the device.
pub fn hash_rows(exec: &Exec, tensor: &Tensor, rows: Range<usize>, before: u64) -> Result<u64, OpError> {
    let width = tensor.rows_cols().1;
    if tensor.dtype() == DType::F32 {
        let mut values = vec![0f32; rows.len() * width];
        exec.read(tensor, rows.start * width, &mut values)?;
        return Ok(hash_words(before, values.iter().map(|value| value.to_bits())));
    }
    let mut values = vec![half::bf16::ZERO; rows.len() * width];
    exec.read(tensor, rows.start * width, &mut values)?;
    Ok(hash_words(before, values.iter().map(|value| u32::from(value.to_bits()))))
}
