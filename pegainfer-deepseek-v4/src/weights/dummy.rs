//! Dummy weights: seeded random values in the official formats, the same for every number of ranks, chosen so that
//! activations roughly keep their size.

use pegainfer_core::exec::Exec;
use pegainfer_core::rng;
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_core::weights::{Columns, SourceTensor, StoredDtype as Dtype};
use pegainfer_kernels::ops::deepseek_v4::{Place, random_codes, random_numbers};

/// Root mean square of random E2M1 codes.
const E2M1_RMS: f32 = 2.93;
/// e4m3 codes without the highest bit of the exponent: all are below 2, and none is NaN.
const E4M3_MASK: u8 = 0xbf;
/// Root mean square of these.
const E4M3_RMS: f32 = 0.59;
/// Bound of numbers that are no matrix of a GEMM: position biases, sinks, biases of experts.
const SMALL: f32 = 0.03;

/// Fills the current rows of `tensor` with the values of a part of a tensor that is stored as `dtype`; `None` for the
/// columns of a vector.
pub(super) fn fill(
    exec: &mut Exec,
    tensor: &mut Tensor,
    (part, columns, dtype): (&SourceTensor, Option<&Columns>, Dtype),
    seed: u64,
) -> Result<(), OpError> {
    let (name, elements) = (&part.name, tensor.elements());
    let seed = name.bytes().fold(seed, |hash, byte| rng::mix(hash ^ u64::from(byte)));
    let (whole, first_column) = columns.map_or((1, 0), |columns| (columns.stored, columns.part.start));
    let place = Place { whole, first_row: part.part.start, first_column };
    let constant = |exec: &mut Exec, tensor: &mut Tensor, value: f32| match dtype {
        Dtype::F32 => exec.write(tensor, 0..elements, |_, out: &mut [f32]| out.fill(value)),
        _ => exec.write(tensor, 0..elements, |_, out: &mut [half::bf16]| out.fill(half::bf16::from_f32(value))),
    };
    match dtype {
        // Weights of norms, and factors of mixing values.
        Dtype::BF16 if columns.is_none() => constant(exec, tensor, 1.0),
        Dtype::F32 if name.ends_with("_scale") => constant(exec, tensor, 1.0),
        Dtype::BF16 => random_numbers(exec, seed, place, (3.0 / whole as f32).sqrt(), tensor),
        Dtype::F32 if name.ends_with("_fn") => random_numbers(exec, seed, place, (3.0 / whole as f32).sqrt(), tensor),
        Dtype::F32 => random_numbers(exec, seed, place, SMALL, tensor),
        Dtype::F8_E8M0 => {
            // A row of a weight has whole / 32 or whole / 128 scales.
            let (group, rms) = if name.contains(".experts.") { (32, E2M1_RMS) } else { (128, E4M3_RMS) };
            let exponent = -(rms * ((whole * group) as f32).sqrt()).log2();
            random_codes(exec, seed, place, (1, (127.0 + exponent.floor()) as u8), tensor)
        }
        Dtype::F8_E4M3 => random_codes(exec, seed, place, (E4M3_MASK, 0), tensor),
        _ => random_codes(exec, seed, place, (u8::MAX, 0), tensor),
    }
}

/// The experts of every id: `k` neighbouring numbers below `count`.
pub(super) fn ids(rows: usize, k: usize, count: usize, seed: u64) -> Vec<u32> {
    let first = |row: usize| rng::below(rng::bits(seed, row as u64), count as u64) as usize;
    (0..rows).flat_map(|row| (0..k).map(move |i| ((first(row) + i) % count) as u32)).collect()
}
